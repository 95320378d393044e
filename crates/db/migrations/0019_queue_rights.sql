-- Who may ask for containers. Users who were there before could, and still can.
ALTER TABLE users ADD COLUMN can_use_queue BOOLEAN NOT NULL DEFAULT FALSE;
UPDATE users SET can_use_queue = TRUE;

-- The hash of the user's token that a token of the queue was made with, directly or through another one, and when it
-- ends by itself.
ALTER TABLE queue_tokens ADD COLUMN made_with TEXT;
ALTER TABLE queue_tokens ADD COLUMN expires_at BIGINT;
-- Those that were there before end with the newest token of their user, and after two weeks. A dispatcher's has no end.
UPDATE queue_tokens SET made_with = (
    SELECT k.hash FROM tokens k WHERE k.user_id = queue_tokens.user_id AND k.revoked_at IS NULL
    ORDER BY k.created_at DESC, k.id DESC LIMIT 1
) WHERE kind IN ('user', 'dispatcher') AND revoked_at IS NULL;
UPDATE queue_tokens SET expires_at = now_us() + 1209600000000 WHERE kind = 'user' AND revoked_at IS NULL;
