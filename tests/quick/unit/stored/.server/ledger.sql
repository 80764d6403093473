BEGIN TRANSACTION;
CREATE TABLE calls (
    number INTEGER PRIMARY KEY,
    call_id TEXT NOT NULL UNIQUE,
    choice_id TEXT  -- the choice that made the tool call; null if several used the id
);
CREATE TABLE conversations (
    number INTEGER PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,
    parent INTEGER,  -- the conversation before the last message
    message BLOB NOT NULL
);
CREATE TABLE kept_sets (
    number INTEGER PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,
    used_at REAL NOT NULL,  -- at most USED_SECONDS before created_at of each record that refers to it
    packed BLOB NOT NULL
);
CREATE TABLE prompts (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- not reused after a deletion, because open requests hold it
    digest BLOB NOT NULL UNIQUE,
    parent TEXT,
    delta BLOB NOT NULL,
    cut INTEGER,  -- of a spliced prompt: its rendering is that of the parent's prompt without the last `cut` tokens,
    tail BLOB     -- followed by these tokens
);
INSERT INTO "prompts" VALUES(1,X'5C105EA06B9F6191CEBA3ACEC34737D6',NULL,X'7801010800F7FF010000000200000000180004',NULL,NULL);
CREATE TABLE records (
    number INTEGER PRIMARY KEY,
    choice_id TEXT NOT NULL UNIQUE,
    request_id TEXT NOT NULL,  -- choice ids begin with it, so it needs no index
    api TEXT NOT NULL,
    owner TEXT NOT NULL,
    project TEXT,
    name TEXT,
    step INTEGER,
    session TEXT,
    created_at REAL NOT NULL,
    prompt INTEGER NOT NULL,
    continues TEXT,
    link TEXT,
    prefix_digest BLOB NOT NULL,  -- of the conversation before the answer
    answer_digest BLOB NOT NULL,
    fingerprint BLOB NOT NULL,
    tokens BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    finish_reason TEXT NOT NULL,
    sampling TEXT NOT NULL,
    is_delivered INTEGER NOT NULL DEFAULT 0,
    -- sampled_from: log-probabilities (nil: the raw ones), kept, sets (each itself or its number); empty: raw, no sets
    sampled_from BLOB,
    requested_at INTEGER,  -- clock.tick; null: by an earlier version
    delivered_at INTEGER
);
INSERT INTO "records" VALUES(1,'ffffffffffffffffffffffffffffffff-0','ffffffffffffffffffffffffffffffff','chat','me','p','a',1,NULL,1.79530951854881238929e+09,1,NULL,NULL,X'CAE66941D9EFBD404E4D88758EA67670',X'DE15FF6FD248CE6BCE0AF155222B418B',X'E3C723E9A4590D34F344241CE23D3C7A',X'7801010800F7FF070000000800000000600010',X'7801011000EFFF000000000000E0BF000000000000D0BF11E6032F','stop','{"n":1,"temperature":0.7}',0,X'78019B7C84E3EC9933FBCE9EF1D937898161020049240848',1795309518549812,NULL);
CREATE TABLE turns (
    request_id TEXT PRIMARY KEY,
    body BLOB NOT NULL,  -- choices and constraints; of an earlier version also messages and tools
    conversation INTEGER,  -- the messages
    tools INTEGER  -- as the only message of a conversation
);
CREATE INDEX prompts_by_parent ON prompts (parent) WHERE parent IS NOT NULL;
CREATE INDEX records_by_prompt ON records (prompt);
CREATE INDEX records_by_session ON records (session) WHERE session IS NOT NULL;
CREATE INDEX records_by_conversation ON records (prefix_digest, answer_digest);
CREATE INDEX records_by_fingerprint ON records (fingerprint);
CREATE INDEX kept_sets_by_use ON kept_sets (used_at);
CREATE INDEX conversations_by_parent ON conversations (parent) WHERE parent IS NOT NULL;
CREATE INDEX turns_by_conversation ON turns (conversation) WHERE conversation IS NOT NULL;
CREATE INDEX turns_by_tools ON turns (tools) WHERE tools IS NOT NULL;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('prompts',1);
COMMIT;
