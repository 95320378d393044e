//! Simulated tasks, through the calls of the runtime.

use std::{path::Path, sync::Arc, time::Duration};

use axum::{
    body::Bytes,
    http::{Request, StatusCode},
};
use serde::de::DeserializeOwned;

use windlass_agent::{
    shim::{
        events::{EventLog, StreamItem},
        runtime::{Exit, FoundState, Handle, JOB_RECORD_PATH, PolicyLimits, PreparedTask, Runtime},
        simulated_runtime::{SimulatedRuntime, SimulationPlan},
    },
    task_dir::TaskDir,
};
use windlass_api::agent::{
    LOG_COMPLETE_HEADER, LOG_END_HEADER,
    events::ShimEventKind,
    runner::{JobRecord, JobStarted, PullResponse},
};
use windlass_model::id::SubmissionId;

struct SimulatedHost {
    runtime: Arc<SimulatedRuntime>,
    events: EventLog,
    task: PreparedTask,
}

impl SimulatedHost {
    fn new(plan: SimulationPlan, image: &str) -> Self {
        let events = EventLog::new("boot");
        let id = SubmissionId(uuid::Uuid::new_v4());
        let spec = serde_json::json!({ "id": id, "name": "t", "image_name": image });
        let task = PreparedTask {
            spec: serde_json::from_value(spec).unwrap(),
            dir: TaskDir::new(Path::new("/nowhere"), id),
            gpus: Vec::new(),
            binds: Vec::new(),
            publish: Vec::new(),
            limits: PolicyLimits { pids: 0, new_privileges: false, capabilities: Vec::new() },
            env: Vec::new(),
        };
        Self { runtime: Arc::new(SimulatedRuntime::new(plan, events.clone())), events, task }
    }

    async fn start(&self) -> Handle {
        self.runtime.pull(&self.task, None, Arc::new(|_| {})).await.unwrap();
        let handle = self.runtime.create(&self.task).await.unwrap();
        self.runtime.start(&self.task, &handle).await.unwrap();
        handle
    }

    fn waiting(&self, handle: &Handle) -> tokio::task::JoinHandle<Exit> {
        let (runtime, task, handle) = (Arc::clone(&self.runtime), self.task.clone(), handle.clone());
        tokio::spawn(async move { runtime.wait(&task, &handle).await.unwrap() })
    }

    async fn call(&self, method: &str, uri: &str, body: &str) -> (StatusCode, axum::http::HeaderMap, Bytes) {
        let request = Request::builder().method(method).uri(uri).body(Bytes::from(body.to_owned())).unwrap();
        let (parts, body) = self.runtime.play(self.task.spec.id, request).unwrap().await.into_parts();
        (parts.status, parts.headers, axum::body::to_bytes(body, usize::MAX).await.unwrap())
    }

    async fn call_json<T: DeserializeOwned>(&self, method: &str, uri: &str) -> T {
        let (status, _, body) = self.call(method, uri, "").await;
        assert_eq!(status, StatusCode::OK);
        serde_json::from_slice(&body).unwrap()
    }

    async fn submit(&self, env: &serde_json::Value) -> StatusCode {
        let body = serde_json::json!({ "run": {}, "job_spec": { "env": env } });
        self.call("POST", "/api/submit", &body.to_string()).await.0
    }

    async fn job_states(&self, count: usize) -> Vec<String> {
        let mut reader = self.events.reader(Some(0), None);
        let mut states = Vec::new();
        while states.len() < count {
            if let StreamItem::Events(events) = reader.next().await {
                states.extend(events.into_iter().filter_map(|event| match event.kind {
                    ShimEventKind::Job { state, .. } => Some(state.state),
                    ShimEventKind::Reset { .. }
                    | ShimEventKind::Task { .. }
                    | ShimEventKind::Gone { .. }
                    | ShimEventKind::Log { .. }
                    | ShimEventKind::Health { .. }
                    | ShimEventKind::Alive => None,
                }));
            }
        }
        states
    }
}

#[tokio::test]
async fn a_simulated_job_behaves_as_its_environment_specifies() {
    let host = SimulatedHost::new(SimulationPlan::default(), "simulated");
    let handle = host.start().await;
    let waiting = host.waiting(&handle);
    let env =
        serde_json::json!({ "SIMULATED_RUN_MS": "30", "SIMULATED_EXIT": "9", "SIMULATED_LOG_LINES": "4" });
    assert_eq!(host.submit(&env).await, StatusCode::OK);
    let started: JobStarted = host.call_json("POST", "/api/run").await;
    assert_eq!(started.username, "root");
    assert_eq!(host.submit(&env).await, StatusCode::CONFLICT);
    let _: JobStarted = host.call_json("POST", "/api/run").await;

    assert_eq!(host.job_states(2).await, ["running", "failed"]);
    let record: JobRecord = host.call_json("GET", JOB_RECORD_PATH).await;
    assert_eq!(record.states.last().unwrap().exit_status, Some(9));
    assert!(record.log_complete);
    let (_, headers, output) = host.call("GET", "/api/logs?stream=job&offset=0", "").await;
    assert_eq!(output.len() as u64, record.log_end);
    assert_eq!(headers[LOG_END_HEADER], record.log_end.to_string().as_str());
    assert_eq!(headers[LOG_COMPLETE_HEADER], "true");
    assert_eq!(output.iter().filter(|&&byte| byte == b'\n').count(), 4);

    assert!(!waiting.is_finished(), "the output may still be read");
    let mut pulled: PullResponse = host.call_json("GET", "/api/pull?timestamp=0").await;
    assert_eq!(pulled.job_states.pop().unwrap().state, "failed");
    assert!(!pulled.has_more);
    assert_eq!(waiting.await.unwrap().code, Some(9));
    let again: PullResponse =
        host.call_json("GET", &format!("/api/pull?timestamp={}", pulled.last_updated)).await;
    assert_eq!((again.job_states, again.job_logs), (Vec::new(), Vec::new()));
}

#[tokio::test]
async fn a_simulated_task_ends_when_stopped_and_is_gone_when_removed() {
    let plan = SimulationPlan { run: Duration::from_secs(3600), ..SimulationPlan::default() };
    let host = SimulatedHost::new(plan, "simulated");
    let handle = host.start().await;
    let waiting = host.waiting(&handle);
    let _: JobStarted = host.call_json("POST", "/api/run").await;
    assert_eq!(host.runtime.found().await.unwrap()[0].state, FoundState::Running);
    host.runtime.stop(&host.task.dir, &handle, Duration::ZERO).await.unwrap();
    assert_eq!(waiting.await.unwrap().code, Some(143));
    assert_eq!(host.job_states(2).await, ["running", "terminated"]);
    assert_eq!(host.runtime.found().await.unwrap()[0].state, FoundState::Ended);
    host.runtime.remove(&host.task.dir, None).await.unwrap();
    assert_eq!(host.runtime.found().await.unwrap(), []);
    assert_eq!(host.call("GET", "/api/pull", "").await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn the_image_tag_sets_the_duration_of_a_simulated_pull() {
    let begun = std::time::Instant::now();
    SimulatedHost::new(SimulationPlan::default(), "simulated:pull-300").start().await;
    assert!(begun.elapsed() >= Duration::from_millis(300));
    let slow = SimulationPlan { pull: Duration::from_secs(3600), ..SimulationPlan::default() };
    let host = SimulatedHost::new(slow, "registry:5000/simulated");
    let pulling = tokio::time::timeout(Duration::from_millis(50), host.start());
    assert!(pulling.await.is_err(), "a port is no tag");
}

#[tokio::test]
async fn a_reader_of_simulated_output_waits_for_more() {
    let plan = SimulationPlan { run: Duration::from_millis(300), log_lines: 1, ..SimulationPlan::default() };
    let host = SimulatedHost::new(plan, "simulated");
    host.start().await;
    let (_, headers, output) = host.call("GET", "/api/logs?offset=0&wait_ms=10", "").await;
    assert_eq!((output.len(), &headers[LOG_COMPLETE_HEADER]), (0, &"false".parse().unwrap()));
    let _: JobStarted = host.call_json("POST", "/api/run").await;
    let (_, _, output) = host.call("GET", "/api/logs?offset=0&wait_ms=20000", "").await;
    assert!(!output.is_empty());
    let rest = format!("/api/logs?offset={}&wait_ms=20000", output.len());
    let (_, headers, rest) = host.call("GET", &rest, "").await;
    assert_eq!((rest.len(), &headers[LOG_COMPLETE_HEADER]), (0, &"true".parse().unwrap()));
}
