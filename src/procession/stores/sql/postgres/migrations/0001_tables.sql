-- Counters, marks and the schema's version.
CREATE TABLE procession_meta (
    name  TEXT PRIMARY KEY,
    value BIGINT NOT NULL
);

-- Draws blocks of message numbers: number = block * 65536 + place in the transaction's chunk. Without
-- a cache, so that a block drawn later is a greater one.
CREATE SEQUENCE procession_blocks;

-- A row is one reader of one queue or topic. A queue has one row, whose consumer is NULL until one
-- is known; a topic has a row without consumer (it makes the topic known) and one a subscriber. A
-- consumer of the library reads the user's own messages: its queue is ''.
-- Suspects: after a worker vanished, messages without session up to suspect_through run in batches
-- of suspect_size.
CREATE TABLE procession_subscriptions (
    id                  BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue               TEXT COLLATE "C" NOT NULL,
    kind                TEXT NOT NULL CHECK (kind IN ('queue', 'topic', 'library')),
    consumer            TEXT COLLATE "C",
    duplicate_window_ms BIGINT NOT NULL DEFAULT 0,
    suspect_size        INTEGER NOT NULL DEFAULT 0,
    suspect_through     BIGINT NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX procession_subscriptions_reader
    ON procession_subscriptions (queue, coalesce(consumer, ''));
CREATE UNIQUE INDEX procession_subscriptions_consumer
    ON procession_subscriptions (consumer) WHERE consumer IS NOT NULL;

-- A waiting message; inserted and deleted, seldom updated. The messages of a session lie side by
-- side in the order of the queue. session is '' where there is none. A scheduled message has its
-- number negated until it is due, which keeps it out of its session's range.
CREATE TABLE procession_messages (
    subscription BIGINT NOT NULL,
    session      BYTEA NOT NULL,
    number       BIGINT NOT NULL,
    message_id   BYTEA NOT NULL,
    type         TEXT NOT NULL DEFAULT '',
    format       SMALLINT NOT NULL,
    body         BYTEA NOT NULL,
    headers      TEXT,
    sent_ms      BIGINT NOT NULL,
    expires_ms   BIGINT,
    attempts     INTEGER NOT NULL DEFAULT 0,
    errors       TEXT,
    replay_of    BIGINT,
    due_at       TIMESTAMPTZ,
    PRIMARY KEY (subscription, session, number)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0,
        autovacuum_analyze_threshold = 50000);
CREATE INDEX procession_messages_due
    ON procession_messages (subscription, due_at) WHERE due_at IS NOT NULL;

-- "This session has work from number low on": inserted by whoever sends, in its transaction, and
-- deleted by whoever accepts the session, or by its holder after it read the messages.
CREATE TABLE procession_ready (
    subscription BIGINT NOT NULL,
    session      BYTEA NOT NULL,
    low          BIGINT NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0,
        autovacuum_analyze_threshold = 50000);
CREATE INDEX procession_ready_session ON procession_ready (subscription, session, low);
CREATE INDEX procession_ready_low ON procession_ready (subscription, low);

-- A row exists only while a session is owned, waits for a retry, or is suspect. retry_at and
-- suspicion outlive their holder.
CREATE TABLE procession_sessions (
    subscription BIGINT NOT NULL,
    key          BYTEA NOT NULL,
    holder       TEXT COLLATE "C",
    worker       TEXT COLLATE "C",
    lane         INTEGER,
    retry_at     TIMESTAMPTZ,
    suspicion    SMALLINT NOT NULL DEFAULT 0,
    PRIMARY KEY (subscription, key)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX procession_sessions_retry
    ON procession_sessions (subscription, retry_at) WHERE retry_at IS NOT NULL;
CREATE INDEX procession_sessions_worker
    ON procession_sessions (worker, lane) WHERE worker IS NOT NULL;

-- Written once, seldom updated. state: 1 in progress, 2 held, 3 done, 4 dead.
CREATE TABLE procession_inbox (
    subscription BIGINT NOT NULL,
    key          BYTEA NOT NULL,
    state        SMALLINT NOT NULL CHECK (state BETWEEN 1 AND 4),
    ended        TEXT,
    fingerprint  BYTEA NOT NULL,
    recorded_ms  BIGINT NOT NULL,
    out_of_order BOOLEAN,
    PRIMARY KEY (subscription, key)
) WITH (autovacuum_vacuum_insert_scale_factor = 0.1);

CREATE TABLE procession_dead_letters (
    id           BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    subscription BIGINT NOT NULL,
    status       TEXT NOT NULL DEFAULT 'dead'
                 CHECK (status IN ('dead', 'queued', 'replayed', 'discarded')),
    reason       TEXT NOT NULL,
    detail       TEXT NOT NULL,
    key          BYTEA,
    fingerprint  BYTEA,
    position     BIGINT NOT NULL,
    message_id   BYTEA NOT NULL,
    session      BYTEA,
    type         TEXT NOT NULL,
    format       SMALLINT NOT NULL,
    body         BYTEA NOT NULL,
    headers      TEXT,
    sent_ms      BIGINT NOT NULL,
    attempts     INTEGER NOT NULL,
    errors       TEXT,
    copies       INTEGER NOT NULL DEFAULT 1,
    died_ms      BIGINT NOT NULL,
    history      TEXT NOT NULL DEFAULT '[]'
);
CREATE UNIQUE INDEX procession_dead_letters_key
    ON procession_dead_letters (subscription, key, fingerprint);
-- Without a key the place in the queue says which message it is: a broker may deliver it again.
CREATE UNIQUE INDEX procession_dead_letters_position
    ON procession_dead_letters (subscription, position) WHERE key IS NULL;
CREATE INDEX procession_dead_letters_session ON procession_dead_letters (subscription, session);

-- One row an incarnation of a process. The lease is by the server's clock.
CREATE TABLE procession_workers (
    id          TEXT COLLATE "C" PRIMARY KEY,
    lease_ms    BIGINT NOT NULL,
    lease_until TIMESTAMPTZ NOT NULL,
    host        TEXT NOT NULL,
    process     INTEGER NOT NULL,
    consumers   TEXT NOT NULL,
    started_at  TIMESTAMPTZ NOT NULL
) WITH (fillfactor = 50);

-- Ends of messages, counted in the transaction that ends them: appended, so that no two batches meet
-- on a row and a long foreign transaction costs nothing; upkeep adds rows up.
CREATE TABLE procession_counts (
    subscription BIGINT NOT NULL,
    ended        TEXT NOT NULL,
    cause        TEXT NOT NULL,
    number       BIGINT NOT NULL
);

-- Message ids of queues with a duplicate detection window.
CREATE TABLE procession_recent_ids (
    queue      TEXT COLLATE "C" NOT NULL,
    message_id BYTEA NOT NULL,
    sent_at    TIMESTAMPTZ NOT NULL,
    body_hash  BYTEA NOT NULL,
    PRIMARY KEY (queue, message_id)
);
CREATE INDEX procession_recent_ids_sent ON procession_recent_ids (queue, sent_at);
