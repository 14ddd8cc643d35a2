-- Every statement of the SQLite store. Each comment names the index that serves it.

-- name: gate
-- First in each batch: is this worker still itself, are there suspects, has a held session come
-- due, has a scheduled message? One probe each: workers PK, subscriptions PK, sessions_held,
-- messages_due.
SELECT EXISTS (SELECT 1 FROM procession_workers WHERE id = :worker),
       s.suspect_size,
       s.suspect_through,
       EXISTS (
           SELECT 1
           FROM procession_sessions
           WHERE subscription = :subscription AND held > 0 AND retry_at <= :lease_now
             AND (worker IS NULL OR worker = :worker)
       ),
       coalesce((SELECT min(due_ms) FROM procession_messages WHERE due_ms IS NOT NULL) <= :now, 0)
FROM procession_subscriptions AS s
WHERE s.id = :subscription;

-- name: fetch
-- A range of messages' primary key, with one probe each of sessions PK and inbox_key.
SELECT m.id, m.session, m.message_id, m.type, m.format, m.body, m.headers, m.sent_ms,
       m.expires_ms, m.attempts, m.errors, m.replay_of, i.state, i.fingerprint,
       s.held > 0 OR s.worker <> :worker
FROM procession_messages AS m
LEFT JOIN procession_sessions AS s ON s.subscription = :subscription AND s.key = m.session
LEFT JOIN procession_inbox AS i ON i.subscription = :subscription AND i.key = m.message_id
WHERE m.id > :low AND m.id < :high
ORDER BY m.id
LIMIT :limit;

-- name: fetch_one
-- Messages' primary key, with one probe each of sessions PK and inbox_key.
SELECT abs(m.id), m.session, m.message_id, m.type, m.format, m.body, m.headers, m.sent_ms,
       m.expires_ms, m.attempts, m.errors, m.replay_of, i.state, i.fingerprint, m.id < 0
FROM procession_messages AS m
LEFT JOIN procession_sessions AS s ON s.subscription = :subscription AND s.key = m.session
LEFT JOIN procession_inbox AS i ON i.subscription = :subscription AND i.key = m.message_id
WHERE m.id IN (:position, -:position) AND :position > :low AND :position < :high
  AND (s.worker IS NULL OR s.worker = :worker);

-- name: open_held_sessions
-- sessions_held: sessions whose held messages may run now.
SELECT key
FROM procession_sessions
WHERE subscription = :subscription AND held > 0 AND retry_at <= :lease_now
  AND (worker IS NULL OR worker = :worker)
ORDER BY retry_at
LIMIT :limit;

-- name: fetch_held
-- messages_aside, from the smallest number (the greatest negative id) on.
SELECT -m.id, m.session, m.message_id, m.type, m.format, m.body, m.headers, m.sent_ms,
       m.expires_ms, m.attempts, m.errors, m.replay_of, i.state, i.fingerprint, 1
FROM procession_messages AS m INDEXED BY procession_messages_aside
LEFT JOIN procession_inbox AS i ON i.subscription = :subscription AND i.key = m.message_id
WHERE m.session = :session AND m.id < -:low AND m.id > -:high AND m.id < 0 AND m.due_ms IS NULL
ORDER BY m.id DESC
LIMIT :limit;

-- name: set_aside
-- Messages' primary key.
UPDATE procession_messages SET id = -id WHERE id = ?;

-- name: add_held
-- Sessions' primary key.
INSERT INTO procession_sessions (subscription, key, held)
VALUES (?, ?, ?)
ON CONFLICT (subscription, key) DO UPDATE SET held = held + excluded.held;

-- name: drop_session_row
-- Sessions' primary key: a row that says nothing goes.
DELETE FROM procession_sessions
WHERE subscription = ? AND key = ? AND held <= 0 AND holder IS NULL;

-- name: make_due
-- messages_due: scheduled messages take their place by number once they are due.
UPDATE procession_messages
SET id = -id, due_ms = NULL
WHERE id IN (
    SELECT id FROM procession_messages
    WHERE due_ms IS NOT NULL AND due_ms <= :now
    ORDER BY due_ms
    LIMIT :limit
);

-- name: trust
-- Subscriptions' primary key: the suspects were passed.
UPDATE procession_subscriptions SET suspect_size = 0, suspect_through = 0 WHERE id = ?;

-- name: judge
-- inbox_key.
SELECT key, state, fingerprint FROM procession_inbox WHERE subscription = ? AND key = ?;

-- name: inbox_row
-- inbox_key.
SELECT i.state, i.fingerprint,
       coalesce(i.ended, CASE i.state WHEN 3 THEN 'processed' END), i.recorded_ms, i.out_of_order
FROM procession_inbox AS i
JOIN procession_subscriptions AS s ON s.id = i.subscription
WHERE s.consumer = ? AND i.key = ?;

-- name: record
-- Appends to inbox; inbox_key arbitrates.
INSERT INTO procession_inbox
    (subscription, key, state, ended, fingerprint, recorded_ms, out_of_order)
VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: record_done
-- As `record`, for what nearly every row is: a key that was processed, many rows a statement.
INSERT INTO procession_inbox (subscription, key, fingerprint, recorded_ms, state)
VALUES (?, ?, ?, ?, 3);

-- name: move_on
-- inbox_key; compare-and-set. An edited message keeps both fingerprints, the newest first.
UPDATE procession_inbox
SET state = :state, ended = :ended, recorded_ms = :now, out_of_order = :out_of_order,
    fingerprint = CASE
        WHEN instr(fingerprint, :fingerprint) % 32 = 1 THEN fingerprint
        ELSE CAST(:fingerprint || fingerprint AS BLOB)
    END
WHERE subscription = :subscription AND key = :key AND state = :expected;

-- name: accept_fingerprint
-- inbox_key.
UPDATE procession_inbox
SET fingerprint = CAST(:fingerprint || fingerprint AS BLOB)
WHERE subscription = :subscription AND key = :key AND instr(fingerprint, :fingerprint) % 32 <> 1;

-- name: remove_range
-- A range of messages' primary key.
DELETE FROM procession_messages WHERE id >= ? AND id <= ?;

-- name: remove
-- Messages' primary key.
DELETE FROM procession_messages WHERE id = ?;

-- name: count_attempt
-- Messages' primary key.
UPDATE procession_messages
SET attempts = max(attempts + :step, 1), session = :session
WHERE id IN (:position, -:position)
RETURNING attempts, id < 0;

-- name: hold
-- Messages' primary key.
UPDATE procession_messages
SET id = -abs(id), session = :session, attempts = :attempts, errors = :errors
WHERE id IN (:position, -:position);

-- name: wait
-- Sessions' primary key.
INSERT INTO procession_sessions (subscription, key, held, retry_at, retry_boot)
VALUES (:subscription, :session, :held, :retry_at, :boot)
ON CONFLICT (subscription, key) DO UPDATE
SET held = held + excluded.held, retry_at = excluded.retry_at, retry_boot = excluded.retry_boot;

-- name: own
-- Sessions' primary key; compare-and-set.
INSERT INTO procession_sessions (subscription, key, holder, worker)
VALUES (:subscription, :session, :holder, :worker)
ON CONFLICT (subscription, key) DO UPDATE
SET holder = excluded.holder, worker = excluded.worker
WHERE holder IS NULL OR worker = excluded.worker
RETURNING key;

-- name: fence
-- Sessions' primary key.
SELECT 1 FROM procession_sessions WHERE subscription = ? AND key = ? AND holder = ?;

-- name: release
-- Sessions' primary key.
UPDATE procession_sessions SET holder = NULL, worker = NULL
WHERE subscription = ? AND key = ? AND holder = ?;

-- name: count
-- Counts' primary key.
INSERT INTO procession_counts (subscription, ended, cause, number)
VALUES (?, ?, ?, ?)
ON CONFLICT (subscription, ended, cause) DO UPDATE SET number = number + excluded.number;

-- name: draw_numbers
-- Meta's primary key. Numbers are drawn last, under the write lock: their order is commit order.
UPDATE procession_meta SET value = value + ? WHERE name = 'number' RETURNING value;

-- name: readers
-- subscriptions_reader.
SELECT id, kind, consumer, duplicate_window_ms FROM procession_subscriptions WHERE queue = ?;

-- name: send
-- Appends to messages, many rows a statement.
INSERT INTO procession_messages
    (id, session, message_id, type, format, body, sent_ms, headers, expires_ms, due_ms)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: send_plain
-- As `send`, for messages without headers, expiry and due time.
INSERT INTO procession_messages (id, session, message_id, type, format, body, sent_ms)
VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: take_held
-- A broker's message, and a replayed dead letter.
INSERT INTO procession_messages
    (id, session, message_id, type, format, body, headers, sent_ms, expires_ms, attempts, errors,
     replay_of)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: remember_id
-- recent_ids' primary key: nothing is returned for an id sent within the window, unless it comes
-- with another body: that is a conflict, which its consumer must see.
INSERT INTO procession_recent_ids (queue, message_id, sent_ms, body_hash)
VALUES (:queue, :message_id, :now, :body_hash)
ON CONFLICT (queue, message_id) DO UPDATE
SET sent_ms = excluded.sent_ms, body_hash = excluded.body_hash
WHERE sent_ms <= :now - :window OR body_hash <> excluded.body_hash
RETURNING 1;

-- name: forget_ids
-- recent_ids_sent.
DELETE FROM procession_recent_ids
WHERE (queue, message_id) IN (
    SELECT queue, message_id FROM procession_recent_ids
    WHERE queue = :queue AND sent_ms <= :now - :window
    LIMIT 1000
);

-- name: kill
-- dead_letters_key, dead_letters_position. A second one is folded into the first, and opens it
-- again if it was decided on: its message died anew. A conflict that was decided on stays so.
INSERT INTO procession_dead_letters
    (subscription, reason, detail, key, fingerprint, position, message_id, session, type, format,
     body, headers, sent_ms, attempts, errors, died_ms)
VALUES (:subscription, :reason, :detail, :key, :fingerprint, :position, :message_id, :session,
        :type, :format, :body, :headers, :sent_ms, :attempts, :errors, :now)
ON CONFLICT (subscription, key, fingerprint) DO UPDATE
SET copies = copies + 1,
    history = CASE
        WHEN status IN ('replayed', 'discarded') AND excluded.reason <> 'conflict'
        THEN json_insert(history, '$[#]', json(:entry)) ELSE history END,
    reason = CASE
        WHEN status IN ('replayed', 'discarded') AND excluded.reason <> 'conflict'
        THEN excluded.reason ELSE reason END,
    detail = CASE
        WHEN status IN ('replayed', 'discarded') AND excluded.reason <> 'conflict'
        THEN excluded.detail ELSE detail END,
    status = CASE
        WHEN status IN ('replayed', 'discarded') AND excluded.reason <> 'conflict'
        THEN 'dead' ELSE status END
ON CONFLICT (subscription, position) WHERE key IS NULL DO UPDATE SET copies = copies + 1;

-- name: fold_copy
-- dead_letters_key, by its first two columns: the letter of a message that was edited has another
-- fingerprint than an early copy of it.
UPDATE procession_dead_letters SET copies = copies + 1
WHERE id = (
    SELECT max(id) FROM procession_dead_letters
    WHERE subscription = :subscription AND key = :key AND reason <> 'conflict'
);

-- name: died_again
-- Dead letters' primary key.
UPDATE procession_dead_letters
SET status = 'dead', reason = :reason, detail = :detail, attempts = :attempts, errors = :errors,
    history = json_insert(history, '$[#]', json(:entry))
WHERE id = :number AND status = 'queued';

-- name: replay_ended
-- Dead letters' primary key.
UPDATE procession_dead_letters
SET status = 'replayed', history = json_insert(history, '$[#]', json(:entry))
WHERE id = :number AND status = 'queued';

-- name: register
-- Workers' primary key.
INSERT INTO procession_workers
    (id, lease_ms, lease_boot, lease_until, host, process, consumers, started_ms)
VALUES (:id, :lease_ms, :boot, :until, :host, :process, :consumers, :now);

-- name: free_other_boots
-- A retry time of another boot is due: its clock began again. A scan of sessions_held, once a start.
UPDATE procession_sessions SET retry_at = 0 WHERE held > 0 AND retry_boot <> :boot;

-- name: renew
-- Workers' primary key.
UPDATE procession_workers SET lease_boot = :boot, lease_until = :lease_now + lease_ms
WHERE id = :id;

-- name: expired
-- The few rows of workers.
SELECT id FROM procession_workers WHERE lease_boot <> :boot OR lease_until < :lease_now;

-- name: end_worker
-- Workers' primary key; compare-and-set.
DELETE FROM procession_workers
WHERE id = :id AND (:dead OR lease_boot <> :boot OR lease_until < :lease_now)
RETURNING consumers;

-- name: free_sessions
-- sessions_worker.
UPDATE procession_sessions SET holder = NULL, worker = NULL WHERE worker = ?;

-- name: drop_free_sessions
-- Rows that say nothing any more; a scan of the few rows of a store's sessions.
DELETE FROM procession_sessions WHERE held <= 0 AND holder IS NULL;

-- name: suspect
-- Subscriptions' index on consumer, and a bounded range of messages' primary key. The first
-- disappearance makes suspects of what a batch may have held; the next narrows it to single runs.
UPDATE procession_subscriptions
SET suspect_size = CASE WHEN suspect_size = 0 THEN :suspect_batch ELSE 1 END,
    -- LIMIT takes no column, so the two lengths are two subqueries.
    suspect_through = coalesce(CASE WHEN suspect_size = 0 THEN (
        SELECT max(id) FROM (
            SELECT id FROM procession_messages
            WHERE id > procession_subscriptions.id << 43
              AND id < (procession_subscriptions.id + 1) << 43
            ORDER BY id
            LIMIT :batch_max
        )
    ) ELSE (
        SELECT max(id) FROM (
            SELECT id FROM procession_messages
            WHERE id > procession_subscriptions.id << 43
              AND id < (procession_subscriptions.id + 1) << 43
            ORDER BY id
            LIMIT :suspect_batch
        )
    ) END, 0)
WHERE consumer = :consumer;

-- name: subscriptions
-- All rows, for people.
SELECT id, queue, kind, consumer FROM procession_subscriptions ORDER BY queue, consumer;

-- name: counts
-- Counts' primary key.
SELECT ended, cause, number FROM procession_counts WHERE subscription = ?;

-- name: waiting
-- A range of messages' primary key.
SELECT count(*) FROM procession_messages WHERE id > :low AND id < :high;

-- name: scheduled
-- messages_due, then a filter.
SELECT count(*) FROM procession_messages INDEXED BY procession_messages_due
WHERE due_ms IS NOT NULL AND id < -:low AND id > -:high;

-- name: head
-- The first row of two ranges of messages' primary key; of those set aside, the scheduled ones on
-- the way are passed over.
SELECT min(sent_ms) FROM (
    SELECT * FROM (
        SELECT sent_ms FROM procession_messages WHERE id > :low AND id < :high
        ORDER BY id LIMIT 1
    )
    UNION ALL
    SELECT * FROM (
        SELECT sent_ms FROM procession_messages
        WHERE id < -:low AND id > -:high AND due_ms IS NULL
        ORDER BY id DESC LIMIT 1
    )
);

-- name: held_numbers
-- Sessions' primary key.
SELECT coalesce(sum(held), 0), count(*) FILTER (WHERE held > 0),
       count(*) FILTER (WHERE holder IS NOT NULL)
FROM procession_sessions WHERE subscription = ?;

-- name: dead_number
-- dead_letters_session: all of the subscription.
SELECT count(*) FROM procession_dead_letters WHERE subscription = ? AND status = 'dead';

-- name: find_dead_letters
-- Dead letters are few; the filter reads them.
SELECT d.id, s.consumer, s.queue, d.status, d.reason, d.detail, d.key, d.fingerprint,
       d.message_id, d.session, d.type, d.format, d.body, d.headers, d.position, d.attempts,
       d.errors, d.copies, d.sent_ms, d.died_ms, d.history
FROM procession_dead_letters AS d
JOIN procession_subscriptions AS s ON s.id = d.subscription
WHERE (:number IS NULL OR d.id = :number)
  AND (:consumer IS NULL OR s.consumer = :consumer)
  AND (:session IS NULL OR d.session = :session)
  AND (:reason IS NULL OR d.reason = :reason)
  AND (:status IS NULL OR d.status = :status)
ORDER BY s.consumer, d.session, d.position, d.id
LIMIT :limit;

-- name: dead_letter
-- Dead letters' primary key.
SELECT subscription, status, reason, key, fingerprint, message_id, session, type, format, body,
       headers, sent_ms
FROM procession_dead_letters WHERE id = ?;

-- name: edit_dead_letter
-- Dead letters' primary key.
UPDATE procession_dead_letters
SET body = :body, fingerprint = :fingerprint,
    history = json_insert(history, '$[#]', json(:entry))
WHERE id = :number AND status = 'dead';

-- name: set_dead_letter
-- Dead letters' primary key; compare-and-set.
UPDATE procession_dead_letters
SET status = :status, history = json_insert(history, '$[#]', json(:entry))
WHERE id = :number AND status = 'dead';

-- name: next_scheduled
-- messages_due, in its order, to the first of this reader. By itself SQLite would read and sort all
-- that is set aside, at each idle look.
SELECT due_ms FROM procession_messages INDEXED BY procession_messages_due
WHERE due_ms IS NOT NULL AND id < -:low AND id > -:high
ORDER BY due_ms
LIMIT 1;

-- name: next_retry
-- sessions_held, to the first entry that no other worker owns.
SELECT min(retry_at) FROM procession_sessions
WHERE subscription = :subscription AND held > 0 AND (worker IS NULL OR worker = :worker);

-- name: declare
-- Subscriptions, a row a queue or topic.
INSERT INTO procession_subscriptions (queue, kind, duplicate_window_ms) VALUES (?, ?, ?);

-- name: set_window
-- subscriptions_reader.
UPDATE procession_subscriptions SET duplicate_window_ms = ? WHERE queue = ?;

-- name: reader_of
-- subscriptions_consumer.
SELECT id, queue FROM procession_subscriptions WHERE consumer = ?;

-- name: name_reader
-- Subscriptions' primary key.
UPDATE procession_subscriptions SET consumer = ? WHERE id = ?;

-- name: subscribe
-- Subscriptions, a row a subscriber.
INSERT INTO procession_subscriptions (queue, kind, consumer) VALUES (?, 'topic', ?);

-- name: is_waiting
-- Sessions' primary key.
SELECT 1 FROM procession_sessions WHERE subscription = ? AND key = ? AND held > 0;

-- name: skip_retries
-- A scan of sessions_held; for tests.
UPDATE procession_sessions SET retry_at = 0 WHERE held > 0 AND retry_at > ?;

-- name: skip_due
-- A scan of messages_due; for tests.
UPDATE procession_messages SET due_ms = 0 WHERE due_ms IS NOT NULL AND due_ms > ?;

-- name: lock
-- Meta's primary key. First in a user's own transaction: takes the write lock before anything is
-- read, and changes nothing.
UPDATE procession_meta SET value = value WHERE name = 'schema' RETURNING value;

-- name: add_library_consumer
-- Subscriptions, a row a consumer; subscriptions_consumer arbitrates.
INSERT INTO procession_subscriptions (queue, kind, consumer) VALUES ('', 'library', ?);

-- name: move_messages
-- Two ranges of messages' primary key.
UPDATE procession_messages SET id = id + CASE WHEN id > 0 THEN :by ELSE -:by END
WHERE id > :low AND id < :high OR id > -:high AND id < -:low;

-- name: drop_reader
-- Subscriptions' primary key.
DELETE FROM procession_subscriptions WHERE id = ? RETURNING queue, kind, duplicate_window_ms;

-- name: give_queue
-- Subscriptions' primary key.
UPDATE procession_subscriptions SET queue = ?, kind = ?, duplicate_window_ms = ? WHERE id = ?;

-- name: prune_span
-- Inbox's primary key: the end of the next span of the walk.
SELECT max(id), recorded_ms FROM (
    SELECT id, recorded_ms FROM procession_inbox WHERE id > :after ORDER BY id LIMIT :limit
);

-- name: prune_inbox
-- A range of inbox's primary key; dead_letters_key for each. Held, dead and running keys stay, and
-- those of which a dead letter waits for a decision. Not indexed: else all keys of the subscription
-- are walked in their unique index, at each step.
DELETE FROM procession_inbox NOT INDEXED
WHERE id > :after AND id <= :last AND subscription = :subscription AND state = 3
  AND recorded_ms < :cutoff
  AND NOT EXISTS (
      SELECT 1 FROM procession_dead_letters AS d
      WHERE d.subscription = procession_inbox.subscription AND d.key = procession_inbox.key
        AND d.status IN ('dead', 'queued')
  );

-- name: prune_dead_letters
-- Dead letters are few.
DELETE FROM procession_dead_letters
WHERE id IN (
    SELECT id FROM procession_dead_letters
    WHERE status IN ('replayed', 'discarded') AND died_ms < :cutoff
    LIMIT :limit
);

-- name: prunable
-- A scan of inbox, for people.
SELECT count(*) FROM procession_inbox WHERE state = 3 AND recorded_ms < :cutoff;

-- name: oldest
-- Messages' primary key from its first row in order, and from the first one set aside.
SELECT
    (SELECT sent_ms FROM procession_messages WHERE id > :low AND id < :high ORDER BY id LIMIT 1),
    (SELECT sent_ms FROM procession_messages
     WHERE id < -:low AND id > -:high ORDER BY id DESC LIMIT 1);

-- name: purge_message
-- A range of messages, filtered: a rare command.
DELETE FROM procession_messages
WHERE message_id = :key AND (id > :low AND id < :high OR id < -:low AND id > -:high)
RETURNING session, id < 0 AND due_ms IS NULL;

-- name: purge_inbox
-- inbox_key.
DELETE FROM procession_inbox WHERE subscription = :subscription AND key = :key;

-- name: purge_dead_key
-- dead_letters_key.
DELETE FROM procession_dead_letters WHERE subscription = :subscription AND key = :key;

-- name: session_keys
-- A range of messages, and dead_letters_session: the keys that are known to be of the session.
SELECT message_id FROM procession_messages
WHERE session = :session AND (id > :low AND id < :high OR id < -:low AND id > -:high)
UNION
SELECT key FROM procession_dead_letters
WHERE subscription = :subscription AND session = :session AND key IS NOT NULL;

-- name: purge_session
-- A range of messages, filtered: a rare command.
DELETE FROM procession_messages
WHERE session = :session AND (id > :low AND id < :high OR id < -:low AND id > -:high);

-- name: purge_dead_session
-- dead_letters_session.
DELETE FROM procession_dead_letters WHERE subscription = :subscription AND session = :session;

-- name: purge_session_row
-- Sessions' primary key.
UPDATE procession_sessions SET held = 0
WHERE subscription = :subscription AND key = :session;

-- name: sessions
-- A range of messages, grouped: for people, not for lanes.
SELECT m.session, count(*), min(m.sent_ms), coalesce(s.held, 0), s.holder,
       coalesce(s.held > 0 AND s.retry_at > 0, 0),
       (SELECT count(*) FROM procession_dead_letters AS d
        WHERE d.subscription = :subscription AND d.session = m.session AND d.status = 'dead')
FROM procession_messages AS m
LEFT JOIN procession_sessions AS s ON s.subscription = :subscription AND s.key = m.session
WHERE (m.id > :low AND m.id < :high OR m.id < -:low AND m.id > -:high)
  AND (:session IS NULL OR m.session = :session)
GROUP BY m.session
ORDER BY count(*) DESC, m.session
LIMIT :limit;

-- name: workers
-- The few rows of workers.
SELECT id FROM procession_workers ORDER BY started_ms, id;

-- name: mark
-- Meta's primary key.
SELECT value FROM procession_meta WHERE name = 'mark:' || ?;

-- name: set_mark
-- Meta's primary key.
INSERT INTO procession_meta (name, value) VALUES ('mark:' || ?, ?)
ON CONFLICT (name) DO UPDATE SET value = excluded.value;
