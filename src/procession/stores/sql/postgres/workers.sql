-- Leases, by the server's clock.

-- name: register
-- Workers' primary key.
INSERT INTO procession_workers (id, lease_ms, lease_until, host, process, consumers, started_at)
VALUES (:id, :lease_ms, clock_timestamp() + :lease_ms * interval '1 millisecond', :host, :process,
        :consumers, clock_timestamp());

-- name: renew
-- Workers' primary key.
UPDATE procession_workers
SET lease_until = clock_timestamp() + lease_ms * interval '1 millisecond'
WHERE id = :id;

-- name: expired
-- The few rows of workers.
SELECT id FROM procession_workers WHERE lease_until < clock_timestamp();

-- name: workers
-- The few rows of workers.
SELECT id FROM procession_workers ORDER BY started_at, id;

-- name: lock_worker
-- Workers' primary key: the lease is looked at again under the lock.
SELECT consumers FROM procession_workers
WHERE id = :id AND (:dead OR lease_until < clock_timestamp())
FOR UPDATE;

-- name: end_worker
-- Workers' primary key.
DELETE FROM procession_workers WHERE id = :id;

-- name: lock_sessions
-- sessions_worker, in the order of the keys. Waits for a batch in flight.
SELECT subscription, key, retry_at > clock_timestamp(), suspicion
FROM procession_sessions
WHERE worker = :id
ORDER BY subscription, key
FOR UPDATE;

-- name: free_sessions
-- sessions_worker; a token for each that has messages (messages' primary key, to the first row).
WITH freed AS (
    UPDATE procession_sessions
    SET holder = NULL, worker = NULL, lane = NULL,
        suspicion = least(suspicion + :more::integer, 2)
    WHERE worker = :id
    RETURNING subscription, key, retry_at
)
INSERT INTO procession_ready (subscription, session, low)
SELECT freed.subscription, freed.key, first.number
FROM freed
CROSS JOIN LATERAL (
    SELECT m.number
    FROM procession_messages AS m
    WHERE m.subscription = freed.subscription AND m.session = freed.key AND m.number > 0
    ORDER BY m.number
    LIMIT 1
) AS first
WHERE freed.retry_at IS NULL OR freed.retry_at <= clock_timestamp();

-- name: drop_free_sessions
-- Sessions' primary key: rows of the freed ones that say nothing, or of which nothing waits.
DELETE FROM procession_sessions AS s
USING unnest(:subscriptions::bigint[], :keys::bytea[]) AS f (subscription, key)
WHERE s.subscription = f.subscription AND s.key = f.key AND s.holder IS NULL AND s.retry_at IS NULL
  AND (s.suspicion = 0 OR NOT EXISTS (
      SELECT 1
      FROM procession_messages AS m
      WHERE m.subscription = s.subscription AND m.session = s.key AND m.number > 0
  ));

-- name: suspect
-- subscriptions_consumer, and a bounded range of messages' primary key. The first disappearance
-- makes suspects of what a batch may have held; the next narrows it to single runs.
UPDATE procession_subscriptions AS s
SET suspect_size = CASE WHEN s.suspect_size = 0 THEN :suspect_batch::integer ELSE 1 END,
    suspect_through = found.number
FROM (
    SELECT o.id, (
        SELECT max(number) FROM (
            SELECT number FROM procession_messages AS m
            WHERE m.subscription = o.id AND m.session = '' AND m.number > 0
            ORDER BY number
            LIMIT CASE WHEN o.suspect_size = 0 THEN :batch_max::integer
                  ELSE :suspect_batch::integer END
        ) AS first
    ) AS number
    FROM procession_subscriptions AS o
    WHERE o.consumer = :consumer
) AS found
WHERE s.id = found.id AND found.number IS NOT NULL;
