-- JSON: the specification of the last deployment that was complete, to go back to when a later one fails.
ALTER TABLE runs ADD COLUMN settled_spec TEXT;

-- How long requests were on their way within a step, all of them together, and how long of that they waited.
ALTER TABLE service_requests ADD COLUMN in_flight_us BIGINT NOT NULL DEFAULT 0;
ALTER TABLE service_requests ADD COLUMN waiting_us BIGINT NOT NULL DEFAULT 0;

-- How requests to a service were answered, as each proxy tells it, JSON. Summed by whoever asks.
CREATE TABLE service_answers (
    run_id TEXT NOT NULL,
    told_at BIGINT NOT NULL,
    proxy_id TEXT NOT NULL,
    answers TEXT NOT NULL,
    PRIMARY KEY (run_id, told_at, proxy_id)
);
