BEGIN TRANSACTION;
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id TEXT NOT NULL UNIQUE,
    idempotency_key TEXT,
    owner TEXT NOT NULL,
    request_digest TEXT NOT NULL,
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    target_step INTEGER,
    config TEXT NOT NULL,
    batch BLOB,
    trajectories BLOB,
    report TEXT NOT NULL,
    metrics TEXT NOT NULL DEFAULT '{}',
    error TEXT,
    created_at REAL NOT NULL,
    finished_at REAL,
    place REAL,             -- in the queue; NULL: its number
    starts INTEGER NOT NULL DEFAULT 0
);
INSERT INTO "jobs" VALUES(1,'3e0857fe33394180950126c760815fee','key','me','digest','p','a','queued',NULL,'{"ratio_to":"start","ratio":"token","clip":"two_sided","epsilon":0.2,"epsilon_high":null,"dual_clip":3.0,"normalisation":"tokens","constant_length":1024,"baseline":"group_mean","scaling":"group_std","correction":"truncate","correction_high":2.0,"correction_low":0.0,"beta":0.0,"kl_estimator":"k3","kl_in":"loss","entropy_bonus":0.0,"overlong":"keep","overlong_length":null,"overlong_buffer":null,"preset":"grpo","learning_rate":0.0001,"warmup_steps":0,"schedule":"constant","schedule_steps":null,"max_grad_norm":1.0,"passes":1,"mini_batches":1,"sampling":"as_sampled","max_staleness":null,"allow_training_without_logprobs":false,"plot_tensors":false}',X'78015D50DB6AC3300CFD173F3BC14E0983FCCA084549D4E035B58D2CAF0FC6FF3E39ED60ECC5C847877351513B851C939A3E8B62822F5C3990C31740F804DAD4647BA31585E79B16EEE8AF6E6B3FAB077D99B53AC21E292C0DF2F9387467FAB13DC328CBCD2526B76476C1374667B5D19D954D8A70224525066271128C4354D3A50D2883ADC263CA7E0546C9728323A1A4C1353C6266143D21C0F60D9E616FC18B1A5AE4B136562BF08B49A65AE7AACB1B5793F9536C969528FD0F2B67C1474402CE2466A6FF38DB3ABE2E0E4EE5F13C90B8DD314A85D65FA47E00993D713D',X'7801CD504B0AC2400CDD7B8A326B91BAF52A524A98C636324ECA4CFC94A177375369FD805B71F9F23EC94B3278B3D80BB18F6657ECAB75614E28D08080E2343E70209BE9093A6E17A90438A2150E84D32CA93946686714D8A1FACC3962301A65D90B7AC9A38E8C8627334B20468A024ABEEB06CD1AF359C2ECF2127F764E61C02B844671B9291542D3506E01AEEE3467B9283BC92BA544CF8EEC505F3044553EA30E946DDF587DC76BFDCFEF2CEF98DAFCBEFEF65FEA57E3EA0ED1EAC31A','{"num_groups":0,"num_groups_trained":0,"num_trajectories":0,"num_trajectories_trained":0,"num_failed_rollouts":0,"num_rows":1,"num_trained_tokens":0,"num_tokens_without_logprob":0,"sampled_steps":{},"turns":{},"continuations":{},"dropped":[],"config":{},"notes":[]}','{"train/reward": 0.5}',NULL,1.79530951844200778013e+09,NULL,NULL,0);
CREATE UNIQUE INDEX jobs_by_request ON jobs (project, name, idempotency_key);
CREATE INDEX jobs_by_state ON jobs (state, number);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('jobs',1);
COMMIT;
