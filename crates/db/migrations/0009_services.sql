-- Who carries requests to services: servers, and later gateways. One that was not seen for a while is gone.
CREATE TABLE proxies (
    id TEXT PRIMARY KEY,
    seen_at BIGINT NOT NULL
);

-- Who may have requests on their way to a replica. Taken before the first request, given back when the last one was
-- answered: a replica that is to end waits for that.
CREATE TABLE proxy_seats (
    proxy_id TEXT NOT NULL,
    job_id TEXT NOT NULL,
    PRIMARY KEY (proxy_id, job_id)
);
CREATE INDEX proxy_seats_job ON proxy_seats (job_id);

-- Requests that came for a service, by whom they came through, in steps of five seconds.
CREATE TABLE service_requests (
    run_id TEXT NOT NULL,
    window_at BIGINT NOT NULL,
    proxy_id TEXT NOT NULL,
    requests BIGINT NOT NULL,
    PRIMARY KEY (run_id, window_at, proxy_id)
);

CREATE INDEX runs_services ON runs (id) WHERE service IS NOT NULL AND NOT finished;
CREATE INDEX jobs_registered ON jobs (run_id) WHERE replica_registered AND NOT finished;
