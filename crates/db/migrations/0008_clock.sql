-- The clock of a Postgres may be set, and locks, due times and timeouts must not follow. Each session carries by how
-- much it was set and when that was noticed; the difference is paid back by a tenth of the time that passes, as on
-- SQLite. `version` says which setting a session carries.

-- postgres
CREATE TABLE clock (
    is_only BOOLEAN PRIMARY KEY DEFAULT TRUE CHECK (is_only),
    version BIGINT NOT NULL,
    offset_us BIGINT NOT NULL,
    since_us BIGINT NOT NULL
);
INSERT INTO clock (version, offset_us, since_us) VALUES (1, 0, 0);
CREATE FUNCTION wall_us() RETURNS BIGINT LANGUAGE sql STABLE AS
    $$ SELECT (extract(epoch FROM now()) * 1000000)::BIGINT $$;
CREATE FUNCTION clock_setting(name TEXT) RETURNS BIGINT LANGUAGE sql STABLE AS
    $$ SELECT coalesce(nullif(current_setting(name, TRUE), ''), '0')::BIGINT $$;
CREATE OR REPLACE FUNCTION now_us() RETURNS BIGINT LANGUAGE sql STABLE AS
    $$ SELECT wall_us() + CASE
        WHEN clock_setting('windlass.offset') = 0 THEN 0
        WHEN clock_setting('windlass.offset') > 0 THEN greatest(0, clock_setting('windlass.offset')
            - greatest(0, wall_us() - clock_setting('windlass.since')) / 10)
        ELSE least(0, clock_setting('windlass.offset')
            + greatest(0, wall_us() - clock_setting('windlass.since')) / 10)
        END $$;
