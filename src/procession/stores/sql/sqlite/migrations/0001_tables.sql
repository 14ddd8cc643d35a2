-- Counters and the schema's version.
CREATE TABLE procession_meta (
    name  TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

INSERT INTO procession_meta (name, value) VALUES ('number', 0);

-- A row is one reader of one queue or topic. A queue has one row, whose consumer is NULL until one
-- is known; a topic has a row without consumer (it makes the topic known) and one a subscriber. A
-- consumer of the library reads the user's own messages: its queue is ''.
-- Suspects: after a worker vanished, messages up to suspect_through run in batches of suspect_size.
CREATE TABLE procession_subscriptions (
    id                  INTEGER PRIMARY KEY,
    queue               TEXT NOT NULL,
    kind                TEXT NOT NULL CHECK (kind IN ('queue', 'topic', 'library')),
    consumer            TEXT,
    duplicate_window_ms INTEGER NOT NULL DEFAULT 0,
    suspect_size        INTEGER NOT NULL DEFAULT 0,
    suspect_through     INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE UNIQUE INDEX procession_subscriptions_reader
    ON procession_subscriptions (queue, coalesce(consumer, ''));
CREATE UNIQUE INDEX procession_subscriptions_consumer
    ON procession_subscriptions (consumer) WHERE consumer IS NOT NULL;

-- id = subscription * 2^43 + number: the messages of one reader lie side by side in the order of
-- the queue, so that reading and removing a batch is one range, without a second index.
-- A negative id is the same message set aside: it is scheduled (due_ms), or its session waits.
CREATE TABLE procession_messages (
    id         INTEGER PRIMARY KEY,
    session    BLOB,
    message_id BLOB NOT NULL,
    type       TEXT NOT NULL DEFAULT '',
    format     INTEGER NOT NULL,
    body       BLOB NOT NULL,
    headers    TEXT,
    sent_ms    INTEGER NOT NULL,
    expires_ms INTEGER,
    attempts   INTEGER NOT NULL DEFAULT 0,
    errors     TEXT,
    replay_of  INTEGER,
    due_ms     INTEGER
) STRICT;
CREATE INDEX procession_messages_aside ON procession_messages (session, id) WHERE id < 0 AND due_ms IS NULL;
CREATE INDEX procession_messages_due ON procession_messages (due_ms) WHERE due_ms IS NOT NULL;

-- A row exists only while a session is owned beyond a transaction, or has messages set aside.
-- retry_at is lease-clock milliseconds; it counts from zero again at each boot of the host.
CREATE TABLE procession_sessions (
    subscription INTEGER NOT NULL,
    key          BLOB NOT NULL,
    holder       TEXT,
    worker       TEXT,
    held         INTEGER NOT NULL DEFAULT 0,
    retry_at     INTEGER NOT NULL DEFAULT 0,
    retry_boot   TEXT,
    PRIMARY KEY (subscription, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX procession_sessions_held ON procession_sessions (subscription, retry_at) WHERE held > 0;
CREATE INDEX procession_sessions_worker ON procession_sessions (worker) WHERE worker IS NOT NULL;

-- Rows are appended, so the table itself is in order of time and pruning walks it from its start.
CREATE TABLE procession_inbox (
    id           INTEGER PRIMARY KEY,
    subscription INTEGER NOT NULL,
    key          BLOB NOT NULL,
    state        INTEGER NOT NULL CHECK (state BETWEEN 1 AND 4),
    ended        TEXT,
    fingerprint  BLOB NOT NULL,
    recorded_ms  INTEGER NOT NULL,
    out_of_order INTEGER
) STRICT;
CREATE UNIQUE INDEX procession_inbox_key ON procession_inbox (subscription, key);

CREATE TABLE procession_dead_letters (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    subscription INTEGER NOT NULL,
    status       TEXT NOT NULL DEFAULT 'dead'
                 CHECK (status IN ('dead', 'queued', 'replayed', 'discarded')),
    reason       TEXT NOT NULL,
    detail       TEXT NOT NULL,
    key          BLOB,
    fingerprint  BLOB,
    position     INTEGER NOT NULL,
    message_id   BLOB NOT NULL,
    session      BLOB,
    type         TEXT NOT NULL,
    format       INTEGER NOT NULL,
    body         BLOB NOT NULL,
    headers      TEXT,
    sent_ms      INTEGER NOT NULL,
    attempts     INTEGER NOT NULL,
    errors       TEXT,
    copies       INTEGER NOT NULL DEFAULT 1,
    died_ms      INTEGER NOT NULL,
    history      TEXT NOT NULL DEFAULT '[]'
) STRICT;
CREATE UNIQUE INDEX procession_dead_letters_key
    ON procession_dead_letters (subscription, key, fingerprint);
-- Without a key the place in the queue says which message it is: a broker may deliver it again.
CREATE UNIQUE INDEX procession_dead_letters_position
    ON procession_dead_letters (subscription, position) WHERE key IS NULL;
CREATE INDEX procession_dead_letters_session ON procession_dead_letters (subscription, session);

-- One row an incarnation of a process. lease_until is boot-time milliseconds of lease_boot.
CREATE TABLE procession_workers (
    id          TEXT PRIMARY KEY,
    lease_ms    INTEGER NOT NULL,
    lease_boot  TEXT NOT NULL,
    lease_until INTEGER NOT NULL,
    host        TEXT NOT NULL,
    process     INTEGER NOT NULL,
    consumers   TEXT NOT NULL,
    started_ms  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Ends of messages, counted in the transaction that ends them.
CREATE TABLE procession_counts (
    subscription INTEGER NOT NULL,
    ended        TEXT NOT NULL,
    cause        TEXT NOT NULL,
    number       INTEGER NOT NULL,
    PRIMARY KEY (subscription, ended, cause)
) STRICT, WITHOUT ROWID;

-- Message ids of queues with a duplicate detection window.
CREATE TABLE procession_recent_ids (
    queue      TEXT NOT NULL,
    message_id BLOB NOT NULL,
    sent_ms    INTEGER NOT NULL,
    body_hash  BLOB NOT NULL,
    PRIMARY KEY (queue, message_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX procession_recent_ids_sent ON procession_recent_ids (queue, sent_ms);
