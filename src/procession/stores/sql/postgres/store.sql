-- The store itself: declarations, numbers for people, marks.

-- name: subscriptions
-- All rows, for people.
SELECT id, queue, kind, consumer FROM procession_subscriptions ORDER BY queue, consumer NULLS FIRST;

-- name: declare
-- Subscriptions, a row a queue or topic.
INSERT INTO procession_subscriptions (queue, kind, duplicate_window_ms)
VALUES (:queue, :kind, :window);

-- name: set_window
-- subscriptions_reader.
UPDATE procession_subscriptions SET duplicate_window_ms = :window WHERE queue = :queue
  AND duplicate_window_ms <> :window;

-- name: reader_of
-- subscriptions_consumer.
SELECT id, queue FROM procession_subscriptions WHERE consumer = :consumer;

-- name: name_reader
-- Subscriptions' primary key.
UPDATE procession_subscriptions SET consumer = :consumer WHERE id = :id AND consumer IS NULL;

-- name: subscribe
-- Subscriptions, a row a subscriber.
INSERT INTO procession_subscriptions (queue, kind, consumer) VALUES (:queue, 'topic', :consumer);

-- name: add_library_consumer
-- Subscriptions, a row a consumer; subscriptions_consumer arbitrates.
INSERT INTO procession_subscriptions (queue, kind, consumer) VALUES ('', 'library', :consumer)
ON CONFLICT DO NOTHING;

-- name: move_messages
-- Messages' primary key.
UPDATE procession_messages SET subscription = :to_id WHERE subscription = :from_id;

-- name: move_tokens
-- Ready's index.
UPDATE procession_ready SET subscription = :to_id WHERE subscription = :from_id;

-- name: drop_reader
-- Subscriptions' primary key.
DELETE FROM procession_subscriptions WHERE id = :id;

-- name: reader
-- Subscriptions' primary key.
SELECT queue, kind, duplicate_window_ms FROM procession_subscriptions WHERE id = :id;

-- name: give_queue
-- Subscriptions' primary key.
UPDATE procession_subscriptions SET queue = :queue, kind = :kind, duplicate_window_ms = :window
WHERE id = :id;

-- name: inbox_row
-- Inbox PK.
SELECT i.state, i.fingerprint,
       coalesce(i.ended, CASE i.state WHEN 3 THEN 'processed' END), i.recorded_ms, i.out_of_order
FROM procession_inbox AS i
JOIN procession_subscriptions AS s ON s.id = i.subscription
WHERE s.consumer = :consumer AND i.key = :key::bytea;

-- name: counts
-- All rows of counts, which upkeep keeps few.
SELECT ended, cause, sum(number)::bigint FROM procession_counts WHERE subscription = :subscription
GROUP BY ended, cause;

-- name: numbers
-- A range of messages' primary key, and sessions' rows: for people.
SELECT count(*) FILTER (WHERE m.number > 0 AND NOT waits),
       count(*) FILTER (WHERE m.number < 0),
       count(*) FILTER (WHERE m.number > 0 AND waits),
       min(m.sent_ms) FILTER (WHERE m.number > 0),
       (extract(epoch FROM clock_timestamp()) * 1000)::bigint
FROM (
    SELECT m.number, m.sent_ms,
           EXISTS (
               SELECT 1 FROM procession_sessions AS s
               WHERE s.subscription = m.subscription AND s.key = m.session
                 AND s.retry_at > clock_timestamp()
           ) AS waits
    FROM procession_messages AS m
    WHERE m.subscription = :subscription
) AS m;

-- name: session_numbers
-- Sessions' rows: for people.
SELECT count(*) FILTER (WHERE retry_at > clock_timestamp()),
       count(*) FILTER (WHERE holder IS NOT NULL)
FROM procession_sessions WHERE subscription = :subscription;

-- name: dead_number
-- dead_letters_key.
SELECT count(*) FROM procession_dead_letters
WHERE subscription = :subscription AND status = 'dead';

-- name: skip_retries
-- sessions_retry; for tests.
UPDATE procession_sessions SET retry_at = clock_timestamp() WHERE retry_at > clock_timestamp();

-- name: skip_due
-- messages_due; for tests.
UPDATE procession_messages SET due_at = clock_timestamp() WHERE due_at > clock_timestamp();

-- name: mark
-- Meta's primary key.
SELECT value FROM procession_meta WHERE name = 'mark:' || :mark::text;

-- name: set_mark
-- Meta's primary key.
INSERT INTO procession_meta (name, value) VALUES ('mark:' || :mark::text, :number)
ON CONFLICT (name) DO UPDATE SET value = excluded.value;
