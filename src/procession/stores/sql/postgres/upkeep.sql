-- Upkeep: forgetting, purging, listing.

-- name: inbox_pages
-- How far the inbox reaches.
SELECT pg_relation_size(:inbox::regclass) / current_setting('block_size')::bigint;

-- name: prune_inbox
-- A range of the inbox's pages; dead_letters_key for each. Held, dead and running keys stay, and
-- those of which a dead letter waits for a decision.
DELETE FROM procession_inbox AS i
WHERE i.ctid >= :first::tid AND i.ctid < :last::tid AND i.subscription = :subscription
  AND i.state = 3 AND i.recorded_ms < :cutoff
  AND NOT EXISTS (
      SELECT 1 FROM procession_dead_letters AS d
      WHERE d.subscription = i.subscription AND d.key = i.key AND d.status IN ('dead', 'queued')
  );

-- name: prune_dead_letters
-- Dead letters are few.
DELETE FROM procession_dead_letters
WHERE id = ANY (ARRAY (
    SELECT id FROM procession_dead_letters
    WHERE status IN ('replayed', 'discarded') AND died_ms < :cutoff
    LIMIT :limit
    FOR UPDATE SKIP LOCKED
));

-- name: fold_counts
-- All rows of counts that nobody else folds: they become one a kind.
WITH gone AS (
    DELETE FROM procession_counts
    WHERE ctid = ANY (ARRAY (SELECT ctid FROM procession_counts LIMIT 10000 FOR UPDATE SKIP LOCKED))
    RETURNING subscription, ended, cause, number
)
INSERT INTO procession_counts (subscription, ended, cause, number)
SELECT subscription, ended, cause, sum(number) FROM gone GROUP BY subscription, ended, cause;

-- name: many_counts
-- To the thousandth row.
SELECT count(*) FROM (SELECT 1 FROM procession_counts LIMIT 1000) AS few;

-- name: prunable
-- A scan of the inbox, for people.
SELECT count(*) FROM procession_inbox
WHERE state = 3
  AND recorded_ms < (extract(epoch FROM clock_timestamp()) * 1000)::bigint - :retention_ms;

-- name: now
-- The server's clock.
SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint;

-- name: oldest
-- A range of messages.
SELECT min(sent_ms) FROM procession_messages WHERE subscription = :subscription;

-- name: purge_message
-- A range of messages, filtered: a rare command.
DELETE FROM procession_messages
WHERE subscription = :subscription AND message_id = :key::bytea;

-- name: purge_inbox
-- Inbox PK.
DELETE FROM procession_inbox WHERE subscription = :subscription AND key = :key::bytea;

-- name: purge_dead_key
-- dead_letters_key.
DELETE FROM procession_dead_letters WHERE subscription = :subscription AND key = :key::bytea;

-- name: session_keys
-- Messages' primary key, and dead_letters_session: the keys known to be of the session.
SELECT message_id FROM procession_messages
WHERE subscription = :subscription AND session = :session::bytea
UNION
SELECT key FROM procession_dead_letters
WHERE subscription = :subscription AND session = :session::bytea AND key IS NOT NULL;

-- name: purge_session
-- Messages' primary key.
DELETE FROM procession_messages WHERE subscription = :subscription AND session = :session::bytea;

-- name: purge_dead_session
-- dead_letters_session.
DELETE FROM procession_dead_letters
WHERE subscription = :subscription AND session = :session::bytea;

-- name: purge_session_row
-- Sessions' primary key: what waited is looked at again, and given up where nothing is left.
UPDATE procession_sessions SET retry_at = clock_timestamp()
WHERE subscription = :subscription AND key = :session::bytea AND retry_at > clock_timestamp();

-- name: sessions
-- A range of messages, grouped: for people, not for lanes.
SELECT m.session, count(*), min(m.sent_ms),
       count(*) FILTER (WHERE m.number > 0 AND s.retry_at > clock_timestamp()),
       max(s.holder), coalesce(bool_or(s.retry_at > clock_timestamp()), false),
       (SELECT count(*) FROM procession_dead_letters AS d
        WHERE d.subscription = :subscription AND d.session = m.session AND d.status = 'dead')
FROM procession_messages AS m
LEFT JOIN procession_sessions AS s ON s.subscription = m.subscription AND s.key = m.session
WHERE m.subscription = :subscription
  AND (:session::bytea IS NULL OR m.session = :session::bytea)
GROUP BY m.session
ORDER BY count(*) DESC, m.session
LIMIT :limit;
