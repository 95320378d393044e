-- What jobs used, sampled while they run. `at` is the database's time; `host_at` is the host's, and only good for
-- the time between two samples. `gpus` is a list of [bytes of memory used, percent busy].
CREATE TABLE job_metrics (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    at BIGINT NOT NULL,
    host_at BIGINT NOT NULL,
    cpu_us BIGINT NOT NULL,
    memory_bytes BIGINT NOT NULL,
    working_set_bytes BIGINT NOT NULL,
    gpus TEXT NOT NULL,
    PRIMARY KEY (job_id, at)
);
CREATE INDEX job_metrics_at ON job_metrics (at);

-- Logs live outside of the database. A run whose logs are gone is not looked at again.
ALTER TABLE runs ADD COLUMN logs_removed BOOLEAN NOT NULL DEFAULT FALSE;
CREATE INDEX runs_logs_kept ON runs (finished_at) WHERE finished AND NOT logs_removed;
