-- Sending: in the transaction of a batch, of a publisher, or of the user.

-- name: readers
-- subscriptions_reader.
SELECT id, kind, consumer, duplicate_window_ms
FROM procession_subscriptions WHERE queue = :queue ORDER BY id;

-- name: draw_block
-- Drawn after the business rows were locked: a later block is a greater one.
SELECT nextval('procession_blocks'), (extract(epoch FROM clock_timestamp()) * 1000)::bigint;

-- name: send
-- Appends to messages; the numbers are drawn already.
INSERT INTO procession_messages
    (subscription, session, number, message_id, type, format, body, headers, sent_ms, expires_ms,
     due_at)
SELECT u.subscription, u.session, u.number, u.message_id, u.type, u.format, u.body, u.headers,
       u.sent_ms, u.expires_ms, to_timestamp(u.due_ms / 1000.0)
FROM unnest(:subscriptions::bigint[], :sessions::bytea[], :numbers::bigint[], :ids::bytea[],
            :types::text[], :formats::bigint[], :bodies::bytea[], :headers::text[],
            :sent::bigint[], :expires::bigint[], :due::bigint[])
     AS u (subscription, session, number, message_id, type, format, body, headers, sent_ms,
           expires_ms, due_ms);

-- name: send_tokens
-- Appends to ready.
INSERT INTO procession_ready (subscription, session, low)
SELECT u.subscription, u.session, u.low
FROM unnest(:subscriptions::bigint[], :sessions::bytea[], :lows::bigint[])
     AS u (subscription, session, low);

-- name: take_held
-- A broker's message.
INSERT INTO procession_messages
    (subscription, session, number, message_id, type, format, body, headers, sent_ms, expires_ms,
     attempts, errors, replay_of)
VALUES (:subscription, :session::bytea, :number::bigint, :message_id::bytea, :type,
        :format::smallint, :body::bytea, :headers, :sent_ms::bigint, :expires_ms::bigint,
        :attempts::integer, :errors, :replay_of::bigint);

-- name: remember_id
-- recent_ids' primary key: nothing is touched for an id sent within the window, unless it comes with
-- another body: that is a conflict, which its consumer must see.
INSERT INTO procession_recent_ids AS r (queue, message_id, sent_at, body_hash)
VALUES (:queue, :message_id::bytea, clock_timestamp(), :body_hash::bytea)
ON CONFLICT (queue, message_id) DO UPDATE
SET sent_at = excluded.sent_at, body_hash = excluded.body_hash
WHERE r.sent_at <= clock_timestamp() - :window::bigint * interval '1 millisecond'
   OR r.body_hash <> excluded.body_hash;

-- name: forget_ids
-- recent_ids_sent.
DELETE FROM procession_recent_ids AS r
WHERE r.ctid = ANY (ARRAY (
    SELECT ctid FROM procession_recent_ids
    WHERE queue = :queue
      AND sent_at <= clock_timestamp() - :window::bigint * interval '1 millisecond'
    LIMIT 1000
    FOR UPDATE SKIP LOCKED
));
