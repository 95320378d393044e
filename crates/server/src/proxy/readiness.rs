//! Determines which replicas of services are ready for requests.
//!
//! Every server checks all running replicas. Two servers that check at once send two probes, which is harmless, and
//! the first result is stored. This is not part of the passes over a job, so that a slow response delays no decision
//! about it.
//!
//! Owns     jobs.probes; jobs.replica_registered while a replica runs.

use std::{collections::HashSet, pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Request, StatusCode, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::Semaphore,
    time::{sleep, timeout},
};
use windlass_model::{
    config::job_spec::{JobSpec, ProbeSpec},
    decide::readiness::{self as brain, ProbeResult, ProbeState},
    event::Entity,
    id::SubmissionId,
    time::Timestamp,
};

use crate::{
    agents::CallContext,
    app::App,
    db::{
        DbError,
        documents::{JOB_PROBES, JOB_SPEC, leave_out},
        service_replicas as rows,
    },
    events::{EventSubject, note},
    hints::Hint,
};

/// Maximum time until a replica that begins to run is checked; a hint causes an immediate check.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Hints within this time are handled together.
const HINT_DEBOUNCE: Duration = Duration::from_millis(20);
/// Maximum number of replicas that are probed concurrently.
const PROBES_MAX: usize = 256;

/// Runs until it is dropped.
pub(super) async fn run(app: App) {
    let hints = app.hints().subscribe(Hint::Runs.as_str());
    let busy = ProbeScheduler { jobs: Arc::default(), places: Arc::new(Semaphore::new(PROBES_MAX)) };
    loop {
        let _ = timeout(POLL_INTERVAL, hints.wait()).await;
        // Where thousands of jobs start and end, hardly any hint is about a replica.
        sleep(HINT_DEBOUNCE).await;
        match rows::running_replicas(app.db()).await {
            Ok(watched) if watched.is_empty() => {}
            Ok(watched) => {
                let Ok(now) = app.db().now().await else { continue };
                for replica in watched {
                    if let Err(error) = busy.probe_if_due(&app, replica, now) {
                        leave_out(&error);
                    }
                }
            }
            Err(error) => tracing::debug!(%error, "failed to list the replicas to probe"),
        }
    }
}

/// The replicas that this server is probing.
struct ProbeScheduler {
    jobs: Arc<Mutex<HashSet<SubmissionId>>>,
    places: Arc<Semaphore>,
}

impl ProbeScheduler {
    /// Starts the due probes of a replica as a separate task. Most replicas have none.
    fn probe_if_due(&self, app: &App, replica: rows::RunningReplica, now: Timestamp) -> Result<(), DbError> {
        let spec: JobSpec = JOB_SPEC.decode(replica.id, &replica.job_spec)?;
        let Some(port) = spec.service_port else { return Ok(()) };
        let stored: Option<Vec<ProbeState>> = JOB_PROBES.decode_opt(replica.id, replica.probes.as_deref())?;
        let states = brain::resize_states(&spec.probes, stored.unwrap_or_default());
        let is_due = |(probe, state): (&ProbeSpec, &ProbeState)| {
            brain::next_probe_at(probe, state).is_some_and(|at| at <= now)
        };
        let due: Vec<bool> = spec.probes.iter().zip(&states).map(is_due).collect();
        let becomes_ready = brain::is_ready(&spec.probes, &states, replica.registered) && !replica.registered;
        if !becomes_ready && !due.contains(&true) {
            return Ok(());
        }
        if !self.jobs.lock().insert(replica.id) {
            return Ok(());
        }
        let (app, jobs, places) = (app.clone(), Arc::clone(&self.jobs), Arc::clone(&self.places));
        tokio::spawn(async move {
            if let Ok(_place) = places.acquire().await {
                let one = ReplicaProber { probes: &spec.probes, port, replica: &replica };
                if let Err(error) = one.evaluate(&app, states, &due).await {
                    tracing::debug!(%error, job = %replica.id, "failed to store the readiness of a replica");
                }
            }
            jobs.lock().remove(&replica.id);
        });
        Ok(())
    }
}

struct ReplicaProber<'a> {
    probes: &'a [ProbeSpec],
    port: u16,
    replica: &'a rows::RunningReplica,
}

impl ReplicaProber<'_> {
    async fn evaluate(&self, app: &App, states: Vec<ProbeState>, due: &[bool]) -> Result<(), DbError> {
        let each = self.probes.iter().zip(states).zip(due).map(|((probe, state), due)| async move {
            if *due { (state, Some(self.probe(app, probe).await)) } else { (state, None) }
        });
        let outcomes = futures_util::future::join_all(each).await;
        let now = app.db().now().await?;
        let after = outcomes.into_iter().map(|(state, outcome)| match outcome {
            Some(outcome) => brain::apply_result(&state, outcome, now),
            None => state,
        });
        let mut states: Vec<ProbeState> = after.collect();
        let ready = brain::is_ready(self.probes, &states, self.replica.registered);
        for state in &mut states {
            state.was_ready |= ready;
        }
        let reported =
            if ready == self.replica.registered { Vec::new() } else { self.reported(app, &states, ready)? };
        let probes = serde_json::to_string(&states).unwrap_or_else(|_| "[]".to_owned());
        let written = rows::set_ready(app.db(), self.replica, &probes, ready, reported).await?;
        if written && ready != self.replica.registered {
            app.wake(&[Hint::Routes, Hint::Runs]);
        }
        Ok(())
    }

    fn reported(
        &self,
        app: &App,
        states: &[ProbeState],
        ready: bool,
    ) -> Result<Vec<crate::db::Change>, DbError> {
        let replica = self.replica;
        let about = EventSubject {
            entity: Entity::Job,
            id: replica.id.0,
            name: &replica.name,
            project: Some(replica.project),
        };
        let (reason, message) = if ready {
            ("ready", "it now receives requests".to_owned())
        } else {
            let why = brain::waiting_message(self.probes, states).unwrap_or_default();
            ("not_ready", format!("it no longer receives requests: {why}"))
        };
        note(app.db(), None, &about, reason, message)
    }

    async fn probe(&self, app: &App, probe: &ProbeSpec) -> ProbeResult {
        result_within(probe, self.send_probe(app, probe)).await
    }

    /// Does not follow redirects: a redirect is not a success.
    async fn send_probe(&self, app: &App, probe: &ProbeSpec) -> Result<StatusCode, String> {
        let agents = app.agents().ok_or("the server has no connections to hosts")?;
        let call = CallContext { instance: self.replica.instance, submission: self.replica.id, epoch: 0 };
        let stream = agents.connect(call, self.port).await.map_err(|error| error.to_string())?;
        exchange(stream, probe_request(probe, self.port)?).await
    }
}

/// Waits for the answer as long as the probe allows, and evaluates it.
async fn result_within(
    probe: &ProbeSpec,
    answer: impl Future<Output = Result<StatusCode, String>>,
) -> ProbeResult {
    let within = Duration::from_secs(u64::try_from(probe.timeout).unwrap_or(1));
    match timeout(within, answer).await {
        Ok(Ok(status)) if status.is_success() => Ok(()),
        Ok(Ok(status)) => Err(format!("it answered {status}")),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(format!("no answer within {} s", within.as_secs())),
    }
}

fn probe_request(probe: &ProbeSpec, port: u16) -> Result<Request<Full<Bytes>>, String> {
    let mut request = Request::builder()
        .method(probe.method.as_str().to_ascii_uppercase().as_str())
        .uri(probe.url.as_str())
        .header(header::HOST, format!("localhost:{port}"));
    for field in &probe.headers {
        request = request.header(field.name.0.as_str(), field.value.0.as_str());
    }
    let body = Full::new(Bytes::from(probe.body.clone().unwrap_or_default()));
    request.body(body).map_err(|error| error.to_string())
}

/// Sends one request and returns the status of the response.
async fn exchange<S>(stream: S, request: Request<Full<Bytes>>) -> Result<StatusCode, String>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
    let requested = async { sender.send_request(request).await.map(|answer| answer.status()) };
    let mut requested = pin!(requested);
    let ended = tokio::select! {
        answer = &mut requested => return answer.map_err(|error| error.to_string()),
        ended = connection => ended,
    };
    // A replica that responds and closes the connection at once has responded.
    requested.await.map_err(|_| match ended {
        Ok(()) => "it closed the connection".to_owned(),
        Err(error) => error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;
    use serde_json::json;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    /// Result of a probe against a replica that reads the request, writes `answer` and closes the connection.
    async fn requested(answer: &'static [u8]) -> Result<StatusCode, String> {
        let (ours, mut theirs) = duplex(4096);
        let replica = tokio::spawn(async move {
            let read = theirs.read(&mut [0; 4096]).await.unwrap();
            assert!(read > 0);
            theirs.write_all(answer).await.unwrap();
        });
        let request = Request::get("/").header(header::HOST, "localhost").body(Full::default()).unwrap();
        let got = exchange(ours, request).await;
        replica.await.unwrap();
        got
    }

    fn probe() -> ProbeSpec {
        let fields = json!({"type": "http", "url": "/ready?deep=1", "method": "post", "timeout": 3,
            "headers": [{"name": "x-probe", "value": "yes"}], "body": "{}", "interval": 5, "ready_after": 1});
        serde_json::from_value(fields).unwrap()
    }

    #[tokio::test]
    async fn a_probe_sends_its_method_url_headers_and_body() {
        let request = probe_request(&probe(), 8000).unwrap();
        assert_eq!(
            (request.method().as_str(), request.uri().to_string().as_str()),
            ("POST", "/ready?deep=1")
        );
        assert_eq!(request.headers()["x-probe"], "yes");
        assert_eq!(request.headers()["host"], "localhost:8000");
        assert_eq!(request.into_body().collect().await.unwrap().to_bytes(), "{}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_without_an_answer_fails_after_its_timeout() {
        let start = tokio::time::Instant::now();
        let silent = result_within(&probe(), std::future::pending()).await;
        assert_eq!(
            (silent, start.elapsed()),
            (Err("no answer within 3 s".to_owned()), Duration::from_secs(3))
        );
        let refused = result_within(&probe(), std::future::ready(Ok(StatusCode::BAD_GATEWAY))).await;
        assert_eq!(refused, Err("it answered 502 Bad Gateway".to_owned()));
    }

    #[tokio::test]
    async fn a_probe_accepts_a_reply_followed_by_an_immediate_close() {
        // The order in which the two are polled is random.
        for _ in 0..64 {
            let got = requested(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi").await;
            assert_eq!(got, Ok(StatusCode::OK));
        }
    }

    #[tokio::test]
    async fn a_probe_fails_if_the_connection_closes_without_a_reply() {
        for _ in 0..64 {
            assert!(requested(b"").await.is_err());
        }
    }
}
