BEGIN TRANSACTION;
CREATE TABLE kept_sets (
    number INTEGER PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,
    used_at REAL NOT NULL,  -- at most USED_SECONDS before created_at of each record that refers to it
    packed BLOB NOT NULL
);
CREATE TABLE prompts (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- never given again: indexes in memory know prompts by it
    digest BLOB NOT NULL UNIQUE,
    parent TEXT,
    delta BLOB NOT NULL,
    cut INTEGER,  -- of a spliced prompt: its rendering is that of the parent's prompt without its last `cut` tokens,
    tail BLOB     -- and these
);
INSERT INTO "prompts" VALUES(1,X'5C105EA06B9F6191CEBA3ACEC34737D6',NULL,X'7801010800F7FF010000000200000000180004',NULL,NULL);
CREATE TABLE records (
    number INTEGER PRIMARY KEY,
    choice_id TEXT NOT NULL UNIQUE,
    request_id TEXT NOT NULL,  -- the choice ids begin with it, so that it needs no index of its own
    api TEXT NOT NULL,
    owner TEXT NOT NULL,
    project TEXT,
    name TEXT,
    step INTEGER,
    session TEXT,
    created_at REAL NOT NULL,
    prompt INTEGER NOT NULL,
    rendered INTEGER NOT NULL,
    continues TEXT,
    link TEXT,
    before BLOB NOT NULL,
    said BLOB NOT NULL,
    fingerprint BLOB NOT NULL,
    tokens BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    finish_reason TEXT NOT NULL,
    sampling TEXT NOT NULL,
    is_delivered INTEGER NOT NULL DEFAULT 0,
    -- beginnings: where else later renderings go on from, 1 where thinking begins there, and the hash
    -- sampled_from: log-probabilities (NULL: the raw ones), kept, sets (each itself or its number); empty: raw, whole
    beginnings BLOB,
    sampled_from BLOB
);
INSERT INTO "records" VALUES(1,'ffffffffffffffffffffffffffffffff-0','ffffffffffffffffffffffffffffffff','chat','me','p','a',1,NULL,1.79530951854881238929e+09,1,-2691343689449507775,NULL,NULL,X'CAE66941D9EFBD404E4D88758EA67670',X'DE15FF6FD248CE6BCE0AF155222B418B',X'E3C723E9A4590D34F344241CE23D3C7A',X'7801010800F7FF070000000800000000600010',X'7801011000EFFF000000000000E0BF000000000000D0BF11E6032F','stop','{"n":1,"temperature":0.7}',0,NULL,X'78019B7C84E3EC9933FBCE9EF1D937898161020049240848');
CREATE TABLE turns (
    request_id TEXT PRIMARY KEY,
    body BLOB NOT NULL
);
CREATE INDEX prompts_by_parent ON prompts (parent) WHERE parent IS NOT NULL;
CREATE INDEX records_by_prompt ON records (prompt, said);
CREATE INDEX records_by_session ON records (session) WHERE session IS NOT NULL;
CREATE INDEX records_by_said ON records (said);
CREATE INDEX records_by_fingerprint ON records (fingerprint);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('prompts',1);
COMMIT;
