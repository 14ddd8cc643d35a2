-- Dead letters, and what operators do with them.

-- name: kill
-- dead_letters_key. A second one is folded into the first, and opens it again if it was decided on:
-- its message died anew. A conflict that was decided on stays so.
INSERT INTO procession_dead_letters AS d
    (subscription, reason, detail, key, fingerprint, position, message_id, session, type, format,
     body, headers, sent_ms, attempts, errors, died_ms)
VALUES (:subscription, :reason, :detail, :key::bytea, :fingerprint::bytea, :position::bigint,
        :message_id::bytea, :session::bytea, :type, :format::smallint, :body::bytea, :headers,
        :sent_ms::bigint, :attempts::integer, :errors,
        (extract(epoch FROM clock_timestamp()) * 1000)::bigint)
ON CONFLICT (subscription, key, fingerprint) DO UPDATE
SET copies = d.copies + 1,
    history = CASE
        WHEN d.status IN ('replayed', 'discarded') AND excluded.reason <> 'conflict'
        THEN (d.history::jsonb || jsonb_build_object('what', :what::text, 'at_ms', excluded.died_ms))::text
        ELSE d.history END,
    reason = CASE
        WHEN d.status IN ('replayed', 'discarded') AND excluded.reason <> 'conflict'
        THEN excluded.reason ELSE d.reason END,
    detail = CASE
        WHEN d.status IN ('replayed', 'discarded') AND excluded.reason <> 'conflict'
        THEN excluded.detail ELSE d.detail END,
    status = CASE
        WHEN d.status IN ('replayed', 'discarded') AND excluded.reason <> 'conflict'
        THEN 'dead' ELSE d.status END;

-- name: kill_keyless
-- dead_letters_position.
INSERT INTO procession_dead_letters AS d
    (subscription, reason, detail, position, message_id, session, type, format, body, headers,
     sent_ms, attempts, errors, died_ms)
VALUES (:subscription, :reason, :detail, :position::bigint, :message_id::bytea, :session::bytea,
        :type, :format::smallint, :body::bytea, :headers, :sent_ms::bigint, :attempts::integer,
        :errors, (extract(epoch FROM clock_timestamp()) * 1000)::bigint)
ON CONFLICT (subscription, position) WHERE key IS NULL DO UPDATE SET copies = d.copies + 1;

-- name: fold_copy
-- dead_letters_key, by its first two columns: the letter of a message that was edited has another
-- fingerprint than an early copy of it.
UPDATE procession_dead_letters SET copies = copies + 1
WHERE id = (
    SELECT max(id) FROM procession_dead_letters
    WHERE subscription = :subscription AND key = :key::bytea AND reason <> 'conflict'
);

-- name: died_again
-- Dead letters' primary key.
UPDATE procession_dead_letters
SET status = 'dead', reason = :reason, detail = :detail, attempts = :attempts::integer,
    errors = :errors,
    history = (history::jsonb || jsonb_build_object(
        'what', :what::text, 'at_ms', (extract(epoch FROM clock_timestamp()) * 1000)::bigint))::text
WHERE id = :number::bigint AND status = 'queued';

-- name: replay_ended
-- Dead letters' primary key.
UPDATE procession_dead_letters
SET status = 'replayed',
    history = (history::jsonb || jsonb_build_object(
        'what', :what::text, 'at_ms', (extract(epoch FROM clock_timestamp()) * 1000)::bigint))::text
WHERE id = :number::bigint AND status = 'queued';

-- name: find_dead_letters
-- Dead letters are few; the filter reads them.
SELECT d.id, s.consumer, s.queue, d.status, d.reason, d.detail, d.key, d.fingerprint,
       d.message_id, d.session, d.type, d.format, d.body, d.headers, d.position, d.attempts,
       d.errors, d.copies, d.sent_ms, d.died_ms, d.history
FROM procession_dead_letters AS d
JOIN procession_subscriptions AS s ON s.id = d.subscription
WHERE (:number::bigint IS NULL OR d.id = :number::bigint)
  AND (:consumer::text IS NULL OR s.consumer = :consumer::text)
  AND (:session::bytea IS NULL OR d.session = :session::bytea)
  AND (:reason::text IS NULL OR d.reason = :reason::text)
  AND (:status::text IS NULL OR d.status = :status::text)
ORDER BY s.consumer, d.session NULLS FIRST, d.position, d.id
LIMIT :limit;

-- name: dead_letter
-- Dead letters' primary key.
SELECT subscription, status, reason, key, fingerprint, message_id, session, type, format, body,
       headers, sent_ms
FROM procession_dead_letters WHERE id = :number FOR UPDATE;

-- name: edit_dead_letter
-- Dead letters' primary key; nothing where another letter of the key has this payload.
UPDATE procession_dead_letters AS d
SET body = :body::bytea, fingerprint = :fingerprint::bytea,
    history = (history::jsonb || (:entry::jsonb || jsonb_build_object(
        'at_ms', (extract(epoch FROM clock_timestamp()) * 1000)::bigint)))::text
WHERE id = :number AND NOT EXISTS (
    SELECT 1 FROM procession_dead_letters AS o
    WHERE o.subscription = d.subscription AND o.key = d.key
      AND o.fingerprint = :fingerprint::bytea AND o.id <> d.id
);

-- name: accept_fingerprint
-- Inbox PK.
UPDATE procession_inbox SET fingerprint = :fingerprint::bytea || fingerprint
WHERE subscription = :subscription AND key = :key::bytea
  AND position(:fingerprint::bytea IN fingerprint) % 32 <> 1;

-- name: set_dead_letter
-- Dead letters' primary key; compare-and-set.
UPDATE procession_dead_letters
SET status = :status,
    history = (history::jsonb || (:entry::jsonb || jsonb_build_object(
        'at_ms', (extract(epoch FROM clock_timestamp()) * 1000)::bigint)))::text
WHERE id = :number AND status = 'dead';

-- name: count_one
-- Appended.
INSERT INTO procession_counts (subscription, ended, cause, number)
VALUES (:subscription, :ended, '', 1);
