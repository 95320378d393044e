//! Replicas of services: their readiness, the proxies that forward requests to them, and the request counts.
//!
//! Nothing here is written under a lock. Readiness is a column with one owner (`proxy::readiness`), and is set only
//! while the replica runs; the end of the replica clears it.

use windlass_model::{
    decide::replicas::Traffic,
    id::{GatewayId, InstanceId, ProjectId, RunId, SubmissionId},
    time::{Span, Timestamp},
};

use super::{Change, Db, DbError, Unit, WriteOutcome, record::statements, runs};
use crate::params;

/// Maximum number of services and replicas that one query returns.
const SERVICES_MAX: usize = 10_000;
const REPLICAS_MAX: usize = 50_000;
/// Time after which a proxy that was not seen forwards nothing any more.
pub const PROXY_LOST_AFTER: Span = Span::secs(15);
/// Longest window that is queried, plus one step.
const REQUESTS_TTL: Span = Span::secs(330);

statements! {
    SERVICES = "SELECT r.id, p.name, r.name, r.spec, r.submitted_at FROM runs r JOIN projects p ON p.id = r.project_id \
                WHERE r.service IS NOT NULL AND NOT r.finished AND r.status <> 'terminating' ORDER BY r.id LIMIT $1";
    /// Services that a gateway publishes, with their domains.
    PUBLISHED = "SELECT r.id, p.name, r.name, r.spec, r.submitted_at, d.domain, r.service FROM runs r \
                 JOIN projects p ON p.id = r.project_id JOIN service_domains d ON d.run_id = r.id \
                 WHERE r.gateway_id = $2 AND r.service IS NOT NULL AND NOT r.finished AND r.status <> 'terminating' \
                 ORDER BY r.id LIMIT $1";
    RUN_OF = "SELECT r.id FROM runs r JOIN projects p ON p.id = r.project_id \
              WHERE p.name = $1 AND r.name = $2 AND r.gateway_id = $3 AND NOT r.finished AND NOT p.deleted";
    /// From the few services to their jobs; the cross join makes SQLite use this order: the other order would scan
    /// every active job.
    READY = "SELECT j.id, j.run_id, j.instance_id, j.replica_group, j.job_spec FROM runs r CROSS JOIN jobs j \
             WHERE r.service IS NOT NULL AND NOT r.finished AND j.run_id = r.id AND j.replica_registered \
             AND NOT j.finished AND j.status = 'running' AND j.end_asked IS NULL \
             AND j.instance_id IS NOT NULL ORDER BY j.run_id, j.replica_num LIMIT $1";
    /// Running replicas that need probing: not ready yet, or with probes that continue. Queried whenever a job changed,
    /// so it starts from the services too.
    WATCHED = "SELECT j.id, j.run_id, j.project_id, j.job_name, j.instance_id, j.job_spec, j.probes, \
               j.replica_registered FROM runs r CROSS JOIN jobs j WHERE r.service IS NOT NULL \
               AND NOT r.finished AND j.run_id = r.id AND j.status = 'running' AND NOT j.finished AND j.end_asked IS NULL AND j.job_num = 0 \
               AND j.instance_id IS NOT NULL AND (NOT j.replica_registered OR j.probes <> '[]') LIMIT $1";
    /// Only if unchanged, and only while it runs.
    SET_READY = "UPDATE jobs SET probes = $3, replica_registered = $4 WHERE id = $1 AND coalesce(probes, '') = $2 \
                 AND status = 'running' AND NOT finished AND end_asked IS NULL";
    VIOLATIONS = "INSERT INTO proxies (id, seen_at) VALUES ($1, now_us()) ON CONFLICT (id) DO UPDATE SET seen_at = now_us()";
    LOST = "DELETE FROM proxies WHERE seen_at < now_us() - $1";
    LOST_SEATS = "DELETE FROM proxy_seats WHERE proxy_id NOT IN (SELECT p.id FROM proxies p)";
    TAKE_SEAT = "INSERT INTO proxy_seats (proxy_id, job_id) SELECT CAST($1 AS TEXT), j.id FROM jobs j WHERE j.id = $2 \
                 AND j.replica_registered AND NOT j.finished AND j.end_asked IS NULL \
                 ON CONFLICT (proxy_id, job_id) DO NOTHING";
    LEAVE_SEAT = "DELETE FROM proxy_seats WHERE proxy_id = $1 AND job_id = $2";
    GONE = "DELETE FROM proxies WHERE id = $1";
    GONE_SEATS = "DELETE FROM proxy_seats WHERE proxy_id = $1";
    MARK_ENDING_DUE = "UPDATE jobs SET due_at = NULL WHERE id = $1 AND status = 'terminating' AND NOT finished";
    COUNT = "INSERT INTO service_requests (run_id, window_at, proxy_id, requests, in_flight_us, waiting_us) \
             VALUES ($1, now_us() - now_us() % 5000000, $2, $3, $4, $5) ON CONFLICT (run_id, window_at, proxy_id) \
             DO UPDATE SET requests = service_requests.requests + excluded.requests, \
             in_flight_us = service_requests.in_flight_us + excluded.in_flight_us, \
             waiting_us = service_requests.waiting_us + excluded.waiting_us";
    ANSWERED = "INSERT INTO service_answers (run_id, told_at, proxy_id, answers) VALUES ($1, now_us(), $2, $3) \
                ON CONFLICT (run_id, told_at, proxy_id) DO NOTHING";
    ANSWERS = "SELECT a.answers FROM service_answers a WHERE a.run_id = $1 AND a.told_at >= now_us() - $2";
    /// Written again by later sweeps while the counts exist, so that two servers that sweep at once count nothing twice.
    SUM_MINUTES = "INSERT INTO service_minutes (run_id, at, requests, in_flight_us, waiting_us) \
        SELECT q.run_id, q.window_at - q.window_at % 60000000, CAST(sum(q.requests) AS BIGINT), \
        CAST(sum(q.in_flight_us) AS BIGINT), CAST(sum(q.waiting_us) AS BIGINT) FROM service_requests q \
        WHERE q.window_at >= now_us() - now_us() % 60000000 - 180000000 \
        AND q.window_at < now_us() - now_us() % 60000000 GROUP BY q.run_id, q.window_at - q.window_at % 60000000 \
        ON CONFLICT (run_id, at) DO UPDATE SET requests = excluded.requests, in_flight_us = excluded.in_flight_us, \
        waiting_us = excluded.waiting_us";
    OLD_MINUTES = "DELETE FROM service_minutes WHERE at < now_us() - $1";
    OLD_ANSWERS = "DELETE FROM service_answers WHERE told_at < now_us() - $1";
    OLD_COUNTS = "DELETE FROM service_requests WHERE window_at < now_us() - $1";
    TRAFFIC = "SELECT CAST(coalesce(sum(q.requests), 0) AS BIGINT), CAST(coalesce(sum(q.in_flight_us), 0) AS BIGINT), \
               CAST(coalesce(sum(q.waiting_us), 0) AS BIGINT) FROM service_requests q \
               WHERE q.run_id = $1 AND q.window_at >= now_us() - $2";
    /// A proxy that would have reported: of the gateway that publishes the service, or any if none does.
    RECEIVED = "SELECT x.id FROM proxies x WHERE x.seen_at >= now_us() - $1 \
             AND (CAST($2 AS TEXT) IS NULL OR x.gateway_id = $2) LIMIT 1";
}

/// A service that proxies route to.
#[derive(Clone, Debug)]
pub struct Service {
    pub run: RunId,
    pub project: String,
    pub name: String,
    /// JSON.
    pub spec: String,
    pub submitted_at: Timestamp,
}

/// A replica that receives requests.
#[derive(Clone, Debug)]
pub struct ReadyReplica {
    pub id: SubmissionId,
    pub run: RunId,
    pub instance: InstanceId,
    pub group: Option<String>,
    /// JSON.
    pub job_spec: String,
}

/// A running replica.
#[derive(Clone, Debug)]
pub struct RunningReplica {
    pub id: SubmissionId,
    pub run: RunId,
    pub project: ProjectId,
    pub name: String,
    pub instance: InstanceId,
    /// JSON.
    pub job_spec: String,
    /// JSON: state of its probes.
    pub probes: Option<String>,
    pub registered: bool,
}

pub async fn services(db: &Db) -> Result<Vec<Service>, DbError> {
    let rows = db.query(SERVICES.as_str(), params![SERVICES_MAX]).await?;
    let each = rows.iter().map(|row| {
        Ok(Service {
            run: row.id(0)?,
            project: row.text(1)?,
            name: row.text(2)?,
            spec: row.text(3)?,
            submitted_at: row.time(4)?,
        })
    });
    each.collect()
}

/// A service that a gateway publishes.
#[derive(Clone, Debug)]
pub struct PublishedService {
    pub service: Service,
    pub domain: String,
    /// JSON: its URL.
    pub place: String,
}

pub async fn published_services(db: &Db, gateway: GatewayId) -> Result<Vec<PublishedService>, DbError> {
    let rows = db.query(PUBLISHED.as_str(), params![SERVICES_MAX, gateway]).await?;
    let each = rows.iter().map(|row| {
        let service = Service {
            run: row.id(0)?,
            project: row.text(1)?,
            name: row.text(2)?,
            spec: row.text(3)?,
            submitted_at: row.time(4)?,
        };
        Ok(PublishedService { service, domain: row.text(5)?, place: row.text(6)? })
    });
    each.collect()
}

/// Run of this name, if this gateway publishes it.
pub async fn find_published_run(
    db: &Db,
    gateway: GatewayId,
    project: &str,
    name: &str,
) -> Result<Option<RunId>, DbError> {
    let row = db.query_opt(RUN_OF.as_str(), params![project, name, gateway]).await?;
    row.map(|row| row.id(0)).transpose()
}

pub async fn ready_replicas(db: &Db) -> Result<Vec<ReadyReplica>, DbError> {
    let rows = db.query(READY.as_str(), params![REPLICAS_MAX]).await?;
    let each = rows.iter().map(|row| {
        Ok(ReadyReplica {
            id: row.id(0)?,
            run: row.id(1)?,
            instance: row.id(2)?,
            group: row.opt_text(3)?,
            job_spec: row.text(4)?,
        })
    });
    each.collect()
}

/// For tests of query plans: the queries that run whenever a job changed.
pub async fn explain(db: &Db) -> Result<[String; 2], DbError> {
    let ready = db.explain(READY.as_str(), params![REPLICAS_MAX]).await?;
    Ok([ready, db.explain(WATCHED.as_str(), params![REPLICAS_MAX]).await?])
}

pub async fn running_replicas(db: &Db) -> Result<Vec<RunningReplica>, DbError> {
    let rows = db.query(WATCHED.as_str(), params![REPLICAS_MAX]).await?;
    let each = rows.iter().map(|row| {
        Ok(RunningReplica {
            id: row.id(0)?,
            run: row.id(1)?,
            project: row.id(2)?,
            name: row.text(3)?,
            instance: row.id(4)?,
            job_spec: row.text(5)?,
            probes: row.opt_text(6)?,
            registered: row.bool(7)?,
        })
    });
    each.collect()
}

/// Stores the probe results of a replica. No effect if another proxy was faster, or the replica is ending. `told` are
/// the events, if it became ready or stopped being ready.
pub async fn set_ready(
    db: &Db,
    replica: &RunningReplica,
    probes: &str,
    registered: bool,
    reported: Vec<Change>,
) -> Result<bool, DbError> {
    let before = replica.probes.as_deref().unwrap_or_default();
    let mut unit =
        Unit::new().expect_one(SET_READY.as_str(), params![replica.id, before, probes, registered]);
    if registered != replica.registered {
        unit = unit.and([runs::mark_due(replica.run)]);
    }
    match db.write(unit.and(reported)).await? {
        WriteOutcome::Done { .. } => Ok(true),
        WriteOutcome::Stale { .. } => Ok(false),
    }
}

/// Records that a proxy is alive and occupies seats at these replicas. Removed replicas lose theirs.
pub async fn record_proxy(db: &Db, proxy: &str, taken: &[SubmissionId]) -> Result<(), DbError> {
    let mut unit = Unit::new().exec(VIOLATIONS.as_str(), params![proxy]);
    for job in taken {
        unit = unit.exec(TAKE_SEAT.as_str(), params![proxy, *job]);
    }
    db.write(unit).await.map(drop)
}

/// Records that a process of a gateway is alive and has these replicas in its routes.
pub async fn record_gateway_node(
    db: &Db,
    node: Change,
    proxy: &str,
    taken: &[SubmissionId],
) -> Result<(), DbError> {
    let mut unit = Unit::new().and([node]);
    for job in taken {
        unit = unit.exec(TAKE_SEAT.as_str(), params![proxy, *job]);
    }
    db.write(unit).await.map(drop)
}

/// Deletes lost proxies and old counts.
pub async fn sweep(db: &Db) -> Result<(), DbError> {
    let unit = Unit::new()
        .exec(LOST.as_str(), params![PROXY_LOST_AFTER.0])
        .exec(LOST_SEATS.as_str(), params![])
        .exec(SUM_MINUTES.as_str(), params![])
        .exec(OLD_MINUTES.as_str(), params![super::series::KEEP_MINUTES.0])
        .exec(OLD_COUNTS.as_str(), params![REQUESTS_TTL.0])
        .exec(OLD_ANSWERS.as_str(), params![REQUESTS_TTL.0]);
    db.write(unit).await.map(drop)
}

/// Releases the seat after the last request was answered.
pub async fn release_seat(db: &Db, proxy: &str, job: SubmissionId) -> Result<(), DbError> {
    let unit = Unit::new()
        .exec(LEAVE_SEAT.as_str(), params![proxy, job])
        .exec(MARK_ENDING_DUE.as_str(), params![job]);
    db.write(unit).await.map(drop)
}

/// Deletes a proxy that ends, with all its seats.
pub async fn remove_proxy(db: &Db, proxy: &str) -> Result<(), DbError> {
    let unit = Unit::new().exec(GONE_SEATS.as_str(), params![proxy]).exec(GONE.as_str(), params![proxy]);
    db.write(unit).await.map(drop)
}

/// Traffic of a service since the last report.
#[derive(Clone, Debug)]
pub struct ServiceTraffic {
    pub run: RunId,
    pub traffic: Traffic,
    /// JSON: counts of the responses.
    pub answers: Option<String>,
}

/// Stores traffic, and makes these runs due at once.
pub async fn record_traffic(
    db: &Db,
    proxy: &str,
    came: &[ServiceTraffic],
    woken: &[RunId],
) -> Result<(), DbError> {
    let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    let mut unit = Unit::new();
    for ServiceTraffic { run, traffic, answers } in came {
        let [requests, in_flight, waiting] =
            [traffic.requests, traffic.in_flight_us, traffic.waiting_us].map(number);
        unit = unit.exec(COUNT.as_str(), params![*run, proxy, requests, in_flight, waiting]);
        if let Some(answers) = answers {
            unit = unit.exec(ANSWERED.as_str(), params![*run, proxy, answers.as_str()]);
        }
    }
    for run in woken {
        unit = unit.and([runs::mark_due(*run)]);
    }
    db.write(unit).await.map(drop)
}

/// Responses of a service within the window, as reported by each proxy: JSON.
pub async fn recent_answers(db: &Db, run: RunId, window: Span) -> Result<Vec<String>, DbError> {
    let rows = db.query(ANSWERS.as_str(), params![run, window.0]).await?;
    rows.iter().map(|row| row.text(0)).collect()
}

/// Traffic of a service within the window, over all proxies. `None` if no proxy is there to report: that is not the
/// same as no requests.
pub async fn traffic(
    db: &Db,
    run: RunId,
    gateway: Option<GatewayId>,
    window: Span,
) -> Result<Option<Traffic>, DbError> {
    if db.query_opt(RECEIVED.as_str(), params![PROXY_LOST_AFTER.0, gateway]).await?.is_none() {
        return Ok(None);
    }
    let Some(row) = db.query_opt(TRAFFIC.as_str(), params![run, window.0]).await? else { return Ok(None) };
    let sum = |at| row.int(at).map(|sum| u64::try_from(sum).unwrap_or_default());
    Ok(Some(Traffic { requests: sum(0)?, in_flight_us: sum(1)?, waiting_us: sum(2)? }))
}
