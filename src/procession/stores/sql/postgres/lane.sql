-- What a lane runs: acceptance, reading, and the rows of a batch. Parameters are arrays where a
-- batch has many rows, so that each is one statement.

-- name: gate
-- First in each batch. Workers' and subscriptions' primary keys.
SELECT EXISTS (SELECT 1 FROM procession_workers WHERE id = :worker),
       s.suspect_size, s.suspect_through
FROM procession_subscriptions AS s
WHERE s.id = :subscription;

-- name: plan_by_index
-- Before our own reads: their plans must depend neither on when statistics were taken nor on JIT.
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
       set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true),
       set_config('enable_material', 'off', true), set_config('enable_memoize', 'off', true),
       set_config('jit', 'off', true), set_config('plan_cache_mode', 'force_generic_plan', true);

-- name: plan_as_before
-- After them: what handlers run is planned as the server is set. `set_config` with the session's
-- own value, since a RESET would outlive the transaction.
SELECT set_config(name, reset_val, true)
FROM unnest(:names::text[], :values::text[]) AS t (name, reset_val);

-- name: keep_worker
-- Workers' primary key. A takeover waits until this transaction ends, or comes first and is seen.
SELECT 1 FROM procession_workers WHERE id = :worker FOR KEY SHARE;

-- name: free_lane
-- sessions_worker: what an earlier connection of this lane owned. Waits for its last transaction.
WITH mine AS (
    SELECT subscription, key, retry_at, suspicion
    FROM procession_sessions
    WHERE worker = :worker AND lane = :lane::integer
    ORDER BY key
    FOR UPDATE
), gone AS (
    DELETE FROM procession_sessions AS s
    USING mine
    WHERE s.subscription = mine.subscription AND s.key = mine.key
      AND mine.retry_at IS NULL AND mine.suspicion = 0
), freed AS (
    UPDATE procession_sessions AS s SET holder = NULL, worker = NULL, lane = NULL
    FROM mine
    WHERE s.subscription = mine.subscription AND s.key = mine.key
      AND (mine.retry_at IS NOT NULL OR mine.suspicion > 0)
)
INSERT INTO procession_ready (subscription, session, low)
SELECT mine.subscription, mine.key, first.number
FROM mine
CROSS JOIN LATERAL (
    SELECT m.number
    FROM procession_messages AS m
    WHERE m.subscription = mine.subscription AND m.session = mine.key AND m.number > 0
    ORDER BY m.number
    LIMIT 1
) AS first
WHERE mine.retry_at IS NULL;

-- name: accept
-- ready_low, in order, with a probe each of sessions PK: takes tokens of sessions that nobody owns.
-- A token of a session that waits is only removed: its retry time is a token itself.
WITH seen AS (
    SELECT r.ctid AS place, r.session, r.low, s.retry_at > clock_timestamp() AS waits
    FROM procession_ready AS r
    LEFT JOIN LATERAL (
        SELECT o.holder, o.retry_at
        FROM procession_sessions AS o
        WHERE o.subscription = :subscription AND o.key = r.session
        LIMIT 1
    ) AS s ON true
    WHERE r.subscription = :subscription AND r.low > :after::bigint AND s.holder IS NULL
      AND EXISTS (SELECT 1 FROM procession_workers WHERE id = :worker)
    ORDER BY r.low
    LIMIT :tokens::integer
    FOR UPDATE OF r SKIP LOCKED
), owned AS (
    INSERT INTO procession_sessions AS s (subscription, key, holder, worker, lane)
    SELECT DISTINCT :subscription::bigint, session, :holder, :worker, :lane::integer
    FROM seen WHERE waits IS NOT TRUE ORDER BY 2
    ON CONFLICT (subscription, key) DO UPDATE
    SET holder = excluded.holder, worker = excluded.worker, lane = excluded.lane, retry_at = NULL
    WHERE s.holder IS NULL AND (s.retry_at IS NULL OR s.retry_at <= clock_timestamp())
    -- Where there was a row already, messages may be left that no token tells of.
    RETURNING s.key, s.suspicion, s.xmax = 0 AS is_new
), gone AS (
    -- Not those of a session that another lane has just accepted: they tell it where to begin.
    DELETE FROM procession_ready
    WHERE ctid = ANY (ARRAY (
        SELECT place FROM seen WHERE waits OR session IN (SELECT key FROM owned)
    ))
)
SELECT seen.session, min(seen.low), max(owned.suspicion), bool_or(owned.key IS NOT NULL),
       bool_or(owned.is_new)
FROM seen LEFT JOIN owned ON owned.key = seen.session
GROUP BY seen.session
ORDER BY 2;

-- name: accept_due
-- sessions_retry: sessions whose retry time has come.
WITH due AS (
    SELECT key
    FROM procession_sessions
    WHERE subscription = :subscription AND retry_at <= clock_timestamp() AND holder IS NULL
      AND EXISTS (SELECT 1 FROM procession_workers WHERE id = :worker)
    ORDER BY retry_at
    LIMIT :limit::integer
    FOR UPDATE SKIP LOCKED
)
UPDATE procession_sessions AS s
SET holder = :holder, worker = :worker, lane = :lane::integer, retry_at = NULL
FROM due
WHERE s.subscription = :subscription AND s.key = due.key
RETURNING s.key, s.suspicion;

-- name: make_due
-- messages_due: scheduled messages take their place by number once they are due.
WITH due AS (
    SELECT session, number
    FROM procession_messages
    WHERE subscription = :subscription AND due_at <= clock_timestamp()
    ORDER BY due_at
    LIMIT :limit::integer
    FOR UPDATE SKIP LOCKED
), moved AS (
    UPDATE procession_messages AS m
    SET number = -m.number, due_at = NULL
    FROM due
    WHERE m.subscription = :subscription AND m.session = due.session AND m.number = due.number
    RETURNING m.session, m.number
), tokens AS (
    INSERT INTO procession_ready (subscription, session, low)
    SELECT :subscription, session, min(number) FROM moved WHERE session <> '' GROUP BY session
)
SELECT count(*) FROM moved;

-- name: own
-- Sessions' primary key; compare-and-set.
INSERT INTO procession_sessions AS s (subscription, key, holder, worker, lane)
SELECT :subscription::bigint, u.key, :holder, :worker, :lane::integer
FROM unnest(:keys::bytea[]) AS u (key)
WHERE EXISTS (SELECT 1 FROM procession_workers WHERE id = :worker)
ORDER BY u.key
ON CONFLICT (subscription, key) DO UPDATE
SET holder = excluded.holder, worker = excluded.worker, lane = excluded.lane
WHERE s.holder IS NULL OR (s.worker = excluded.worker AND s.lane = excluded.lane)
RETURNING s.key, s.suspicion;

-- name: tokens
-- Ready's index, for each session that may be read. Read before the messages, so that a token that is
-- seen here has its messages seen there.
SELECT s.which, r.low
FROM unnest(:keys::bytea[], :holders::text[]) WITH ORDINALITY AS s (key, holder, which)
CROSS JOIN LATERAL (
    SELECT 1
    FROM procession_sessions AS o
    WHERE o.subscription = :subscription AND o.key = s.key AND o.holder = s.holder
      AND (o.retry_at IS NULL OR o.retry_at <= clock_timestamp())
    OFFSET 0 -- keeps the sessions in their order
) AS held
JOIN LATERAL (
    SELECT r.low
    FROM procession_ready AS r
    WHERE r.subscription = :subscription AND r.session = s.key
    LIMIT 1000
) AS r ON true;

-- name: fetch
-- For each session a range of messages' primary key, with a probe each of sessions PK, of ready's
-- index and of inbox PK. A token tells where a transaction that committed late begins: the reading
-- starts there, in the same snapshot.
SELECT s.which, m.place, m.number, m.message_id, m.type, m.format, m.body, m.headers, m.sent_ms,
       m.expires_ms, m.attempts, m.errors, m.replay_of, i.state, i.fingerprint
FROM unnest(:keys::bytea[], :holders::text[], :cursors::bigint[])
     WITH ORDINALITY AS s (key, holder, cursor, which)
CROSS JOIN LATERAL (
    SELECT 1
    FROM procession_sessions AS o
    WHERE o.subscription = :subscription AND o.key = s.key AND o.holder = s.holder
      AND (o.retry_at IS NULL OR o.retry_at <= clock_timestamp())
    OFFSET 0 -- keeps the sessions in their order
) AS held
CROSS JOIN LATERAL (
    SELECT least(s.cursor, (
        SELECT r.low - 1
        FROM procession_ready AS r
        WHERE r.subscription = :subscription AND r.session = s.key
        ORDER BY r.low
        LIMIT 1
    )) AS number
) AS after
CROSS JOIN LATERAL (
    SELECT m.ctid AS place, m.number, m.message_id, m.type, m.format, m.body, m.headers, m.sent_ms,
           m.expires_ms, m.attempts, m.errors, m.replay_of
    FROM procession_messages AS m
    WHERE m.subscription = :subscription AND m.session = s.key AND m.number > after.number
    ORDER BY m.number
    LIMIT :each::integer
) AS m
LEFT JOIN LATERAL (
    SELECT i.state, i.fingerprint
    FROM procession_inbox AS i
    WHERE i.subscription = :subscription AND i.key = m.message_id
    LIMIT 1 -- a subquery, never a join: else its plan may read the whole inbox for each message
) AS i ON true
LIMIT :limit::integer;

-- name: fetch_keyless
-- A range of messages' primary key, with a probe of inbox PK each. The row lock is the acceptance:
-- others skip it, and it ends with this transaction.
SELECT 0::bigint, m.ctid, m.number, m.message_id, m.type, m.format, m.body, m.headers, m.sent_ms,
       m.expires_ms, m.attempts, m.errors, m.replay_of, i.state, i.fingerprint
FROM procession_messages AS m
LEFT JOIN LATERAL (
    SELECT i.state, i.fingerprint
    FROM procession_inbox AS i
    WHERE i.subscription = :subscription AND i.key = m.message_id
    LIMIT 1 -- a subquery, never a join: else its plan may read the whole inbox for each message
) AS i ON true
WHERE m.subscription = :subscription AND m.session = '' AND m.number > :after::bigint
ORDER BY m.number
LIMIT :limit::integer
FOR UPDATE OF m SKIP LOCKED;

-- name: fetch_one
-- Messages' primary key, with a probe each of sessions PK and inbox PK.
SELECT s.which, m.ctid, m.number, m.message_id, m.type, m.format, m.body, m.headers, m.sent_ms,
       m.expires_ms, m.attempts, m.errors, m.replay_of, i.state, i.fingerprint
FROM unnest(:keys::bytea[], :holders::text[]) WITH ORDINALITY AS s (key, holder, which)
JOIN procession_sessions AS o
    ON o.subscription = :subscription AND o.key = s.key AND o.holder = s.holder
JOIN procession_messages AS m
    ON m.subscription = :subscription AND m.session = s.key AND m.number = :number::bigint
LEFT JOIN LATERAL (
    SELECT i.state, i.fingerprint
    FROM procession_inbox AS i
    WHERE i.subscription = :subscription AND i.key = m.message_id
    LIMIT 1
) AS i ON true;

-- name: keyless_waits
-- Messages' primary key, to its first row.
SELECT EXISTS (
    SELECT 1
    FROM procession_messages
    WHERE subscription = :subscription AND session = '' AND number > :after::bigint
);

-- name: trust_keyless
-- Subscriptions' primary key: the suspects were passed.
UPDATE procession_subscriptions AS s SET suspect_size = 0, suspect_through = 0
WHERE s.id = :subscription AND NOT EXISTS (
    SELECT 1
    FROM procession_messages AS m
    WHERE m.subscription = s.id AND m.session = '' AND m.number > 0
      AND m.number <= s.suspect_through
);

-- name: judge
-- Inbox PK.
SELECT i.key, i.state, i.fingerprint
FROM procession_inbox AS i
WHERE i.subscription = :subscription AND i.key = ANY (:keys::bytea[]);

-- name: waiting
-- Messages' primary key, to the first row of each session.
SELECT k.key
FROM unnest(:keys::bytea[]) AS k (key)
WHERE EXISTS (
    SELECT 1
    FROM procession_messages AS m
    WHERE m.subscription = :subscription AND m.session = k.key AND m.number > 0
);

-- name: count_attempt
-- Messages' primary key. A message without session becomes a session of its own.
UPDATE procession_messages
SET attempts = least(greatest(attempts, 0)::bigint + :step::integer, 1000000)::integer,
    session = :own_session::bytea
WHERE subscription = :subscription AND session = :session::bytea AND number = :number::bigint
RETURNING greatest(attempts, 1);

-- name: fence
-- Sessions' primary key, in its order. Takeovers wait for these locks.
SELECT s.key
FROM procession_sessions AS s
JOIN unnest(:keys::bytea[], :holders::text[]) AS f (key, holder)
    ON f.key = s.key AND f.holder = s.holder
WHERE s.subscription = :subscription AND s.key = ANY (:keys::bytea[])
ORDER BY s.key
FOR SHARE OF s;

-- name: trust
-- Sessions' primary key: what was suspect, or waited, has ended.
UPDATE procession_sessions AS s SET suspicion = 0, retry_at = NULL
FROM unnest(:keys::bytea[], :holders::text[]) AS f (key, holder)
WHERE s.subscription = :subscription AND s.key = f.key AND s.holder = f.holder;

-- name: give_up
-- Sessions' primary key, in its order; messages' for the first one left. A session that waits keeps
-- its row; another one leaves a token where messages are left.
WITH mine AS (
    SELECT s.key, f.wait_ms, f.low, f.passed AND f.wait_ms IS NULL AS passed, s.retry_at,
           s.suspicion
    FROM unnest(:keys::bytea[], :holders::text[], :waits::bigint[], :lows::bigint[],
                :passed::boolean[]) AS f (key, holder, wait_ms, low, passed)
    JOIN procession_sessions AS s
        ON s.subscription = :subscription AND s.key = f.key AND s.holder = f.holder
    ORDER BY s.key
    FOR UPDATE OF s
), gone AS (
    DELETE FROM procession_sessions AS s
    USING mine
    WHERE s.subscription = :subscription AND s.key = mine.key AND mine.wait_ms IS NULL
      AND (mine.passed OR (mine.retry_at IS NULL AND mine.suspicion = 0))
), kept AS (
    UPDATE procession_sessions AS s
    SET holder = NULL, worker = NULL, lane = NULL,
        retry_at = CASE
            WHEN mine.wait_ms IS NULL THEN mine.retry_at
            ELSE clock_timestamp() + mine.wait_ms * interval '1 millisecond'
        END,
        suspicion = CASE WHEN mine.wait_ms IS NULL THEN s.suspicion ELSE 0 END
    FROM mine
    WHERE s.subscription = :subscription AND s.key = mine.key
      AND NOT (mine.wait_ms IS NULL
               AND (mine.passed OR (mine.retry_at IS NULL AND mine.suspicion = 0)))
), tokens AS (
    INSERT INTO procession_ready (subscription, session, low)
    SELECT :subscription, mine.key, first.number
    FROM mine
    CROSS JOIN LATERAL (
        SELECT m.number
        FROM procession_messages AS m
        WHERE m.subscription = :subscription AND m.session = mine.key AND m.number >= mine.low
        ORDER BY m.number
        LIMIT 1
    ) AS first
    WHERE mine.low IS NOT NULL AND mine.wait_ms IS NULL
      AND (mine.retry_at IS NULL OR mine.passed)
)
SELECT key FROM mine;

-- name: wait_in_hand
-- Sessions' primary key: a session that its holder keeps, since it is a broker's.
UPDATE procession_sessions
SET retry_at = clock_timestamp() + :wait_ms::bigint * interval '1 millisecond'
WHERE subscription = :subscription AND key = :key::bytea AND holder = :holder;

-- name: wait_alone
-- Sessions' primary key: a session that nobody owns.
INSERT INTO procession_sessions AS s (subscription, key, retry_at)
VALUES (:subscription, :key::bytea,
        clock_timestamp() + :wait_ms::bigint * interval '1 millisecond')
ON CONFLICT (subscription, key) DO UPDATE SET retry_at = excluded.retry_at;

-- name: hold
-- Messages' primary key.
UPDATE procession_messages
SET session = :own_session::bytea, attempts = :attempts::integer, errors = :errors
WHERE subscription = :subscription AND session = :session::bytea AND number = :number::bigint;

-- name: record
-- Inbox PK, in its order: a key that is there already inserts nothing, and the count tells.
INSERT INTO procession_inbox
    (subscription, key, state, ended, fingerprint, recorded_ms, out_of_order)
SELECT :subscription, u.key, u.state, u.ended, u.fingerprint, now.ms, u.out_of_order
FROM unnest(:keys::bytea[], :fingerprints::bytea[], :states::bigint[], :ends::text[],
            :late::boolean[]) AS u (key, fingerprint, state, ended, out_of_order)
CROSS JOIN (SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS ms) AS now
ORDER BY u.key
ON CONFLICT DO NOTHING;

-- name: record_done
-- As `record`, for what nearly every row is: a key that was processed.
INSERT INTO procession_inbox (subscription, key, state, fingerprint, recorded_ms)
SELECT :subscription, u.key, 3, u.fingerprint, now.ms
FROM unnest(:keys::bytea[], :fingerprints::bytea[]) AS u (key, fingerprint)
CROSS JOIN (SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS ms) AS now
ORDER BY u.key
ON CONFLICT DO NOTHING;

-- name: move_on
-- Inbox PK; compare-and-set. An edited message keeps both fingerprints, the newest first.
UPDATE procession_inbox
SET state = :state::smallint, ended = :ended, out_of_order = :late::boolean,
    recorded_ms = (extract(epoch FROM clock_timestamp()) * 1000)::bigint,
    fingerprint = CASE
        WHEN position(:fingerprint::bytea IN fingerprint) % 32 = 1 THEN fingerprint
        ELSE :fingerprint::bytea || fingerprint
    END
WHERE subscription = :subscription AND key = :key::bytea AND state = :expected::smallint;

-- name: remove
-- By place, which is quicker than any index; the number makes sure that it is still this row there.
DELETE FROM procession_messages
WHERE ctid = ANY (:places::tid[]) AND number = ANY (:numbers::bigint[])
  AND subscription = :subscription;

-- name: forget_tokens
-- Ready's index.
DELETE FROM procession_ready AS r
USING unnest(:keys::bytea[], :lows::bigint[]) AS t (key, low)
WHERE r.subscription = :subscription AND r.session = t.key AND r.low = t.low;

-- name: count
-- Appended: no two batches meet on a row.
INSERT INTO procession_counts (subscription, ended, cause, number)
SELECT :subscription, u.ended, u.cause, u.number
FROM unnest(:ends::text[], :causes::text[], :numbers::bigint[]) AS u (ended, cause, number);

-- name: changed
-- To the first row each: messages' primary key, ready_low with a probe of sessions PK,
-- sessions_retry, messages_due.
SELECT EXISTS (
           SELECT 1
           FROM procession_messages
           WHERE subscription = :subscription AND session = '' AND number > :after::bigint
       ) OR EXISTS (
           SELECT 1
           FROM procession_ready AS r
           LEFT JOIN LATERAL (
               SELECT o.holder, o.worker, o.lane, o.retry_at
               FROM procession_sessions AS o
               WHERE o.subscription = :subscription AND o.key = r.session
               LIMIT 1
           ) AS s ON true
           WHERE r.subscription = :subscription
             AND (s.holder IS NULL OR (s.worker = :worker AND s.lane = :lane::integer))
             AND (s.retry_at IS NULL OR s.retry_at <= clock_timestamp())
       ) OR EXISTS (
           SELECT 1
           FROM procession_sessions AS s
           WHERE s.subscription = :subscription AND s.retry_at <= clock_timestamp()
             AND (s.holder IS NULL OR (s.worker = :worker AND s.lane = :lane::integer))
       ) OR EXISTS (
           SELECT 1
           FROM procession_messages
           WHERE subscription = :subscription AND due_at <= clock_timestamp()
       );
