-- Who brought an upload and what it counts for against what one user may store. Differences that were there before count
-- for nobody. The indexes hold the sizes, so that a sum reads no upload.
ALTER TABLE codes ADD COLUMN user_id TEXT;
ALTER TABLE codes ADD COLUMN size BIGINT NOT NULL DEFAULT 0;
ALTER TABLE archives ADD COLUMN size BIGINT NOT NULL DEFAULT 0;
UPDATE codes SET size = length(blob);
UPDATE archives SET size = length(blob);
CREATE INDEX codes_sizes ON codes (user_id, size);
CREATE INDEX archives_sizes ON archives (user_id, size);
