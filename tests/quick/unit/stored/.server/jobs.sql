BEGIN TRANSACTION;
PRAGMA user_version=2;
CREATE TABLE jobs (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        job_id TEXT NOT NULL UNIQUE,
        project TEXT NOT NULL,
        name TEXT NOT NULL,
        idempotency_key TEXT,
        request_digest TEXT NOT NULL,
        config TEXT NOT NULL,
        batch BLOB,
        trajectories BLOB,
        created_at REAL NOT NULL,
        place REAL,                             -- order in the queue; NULL: the number
        state TEXT NOT NULL DEFAULT 'queued',
        phase TEXT NOT NULL DEFAULT 'queued',
        completed INTEGER,
        total INTEGER,
        target_step INTEGER,
        attempts TEXT NOT NULL DEFAULT '{}',
        next_attempt_at REAL,                   -- NULL: at once
        last_error TEXT,
        report TEXT NOT NULL,
        metrics TEXT NOT NULL DEFAULT '{}',
        finished_at REAL,
        changes INTEGER NOT NULL DEFAULT 0,
        num_tokens INTEGER NOT NULL DEFAULT 0,  -- computed for it
        begins REAL,                            -- virtual times (fair_order.py); NULL: it has not begun
        ends REAL,
        seconds REAL                            -- of its last attempt, if that made a step
    );
INSERT INTO "jobs" VALUES(1,'3e0857fe33394180950126c760815fee','p','a','key','digest','{"ratio_to":"start","ratio":"token","clip":"two_sided","epsilon":0.2,"epsilon_high":null,"dual_clip":3.0,"normalisation":"tokens","constant_length":1024,"baseline":"group_mean","scaling":"group_std","correction":"truncate","correction_high":2.0,"correction_low":0.0,"beta":0.0,"kl_estimator":"k3","kl_in":"loss","entropy_bonus":0.0,"overlong":"keep","overlong_length":null,"overlong_buffer":null,"preset":"grpo","learning_rate":0.0001,"warmup_steps":0,"schedule":"constant","schedule_steps":null,"max_grad_norm":1.0,"passes":1,"mini_batches":1,"sampling":"as_sampled","max_staleness":null,"allow_training_without_logprobs":false,"plot_tensors":false}',X'78015D50DB8A84300CFD973C57510719F0571691AA59E98EB625A6330FE2BF6FD21961D997929E1CCE25072C1452DCA1FB3A80C9FEE0C4811CBE01C297A519BABAAC0C50787D68E1817E70B3FE6AD3985B6F600D4BA4302AE4D3BA9AA22A5B7D9A5696B3DB99DC98D805AF8CA23695296AD9ECD166E4809D2DB13809C6214277D30165A84FE131253F5946C9F26DD71D250D4E618B8951F48460E7A7F56C170D7E40A391DB53595AE0C22493609C287BF6677F9AE34381AEFAD35156067CDA4624E8B48FFEFFB7907BE11691AC084A8AAABCE733381E4667B3659B2F27960F8CD2ED1212E1E1BA7AC67E01DAC6807D',X'1F8B0800000000000203CD90C10E82301044EF7E05E9D918BCFA2B86904D59614D6D49775109E1DFDD6280C8C1A3F1D6B7339D767630F8B4D80A05CFE6949D8B7D666E28508180F230BE3992E5195DA817AB44B8A2951009A7D9A06666A8678AC1A19E4CC7188DFA6DF0825ED2A821A369AB0598890554FCF4F59A354E6F85E052ACEF9C538CF8805829E7875C11AA8A520B7065A339CB8FD24DF22AA9D00647B62FEF18599D6BD485FC1775537FBB9D651D539BDFD73FFE4BFD62DCBD00AA83F2514E020000',1.79530951844200778013e+09,NULL,'queued','queued',NULL,NULL,NULL,'{}',NULL,NULL,'{"num_groups":0,"num_groups_trained":0,"num_trajectories":0,"num_trajectories_trained":0,"num_failed_rollouts":0,"num_rows":1,"num_trained_tokens":0,"num_tokens_without_logprob":0,"sampled_steps":{},"turns":{},"continuations":{},"dropped":[],"config":{},"notes":[]}','{"train/reward": 0.5}',NULL,0,0,NULL,NULL,NULL);
CREATE UNIQUE INDEX jobs_by_request ON jobs (project, name, idempotency_key);
CREATE INDEX jobs_by_state ON jobs (state, number);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('jobs',1);
COMMIT;
