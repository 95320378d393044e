//! Hosts of SSH fleets whose agents are installed while the database fails.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use serde_json::{Value, json};
use windlass_backend::{
    AgentEndpoint, Backend, BackendFuture, BackendInstance, Backends, DeleteProgress, InstanceRequest,
    InstanceSource, InstanceState,
};
use windlass_engine::{BatchPipeline, Engine, Hints, Pipeline, Settings};
use windlass_model::plan::offers::Offer;
use windlass_server::{
    agents::AgentApi,
    db::{Db, DbError, FaultHook, HookFuture},
    parsed_run_spec::RunSpecCache,
    pipelines::{self, PipelineContext, PipelineRegistry},
};
use windlass_testkit::wait::TIMEOUT;

use crate::{
    http::{ServerFixture, TestServer, on_both},
    scripted_hosts::ScriptedHosts,
};

on_both! {
    m8_a_failed_query_during_host_setup_does_not_terminate_the_host
}

/// Maximum time for passes in progress when the engine stops.
const STOP_GRACE: Duration = Duration::from_secs(10);

/// Installs agents on hosts at once. The first time, it makes the next query fail.
struct SshBackend {
    created: AtomicUsize,
    query_fails: Arc<AtomicBool>,
}

impl Backend for SshBackend {
    fn name(&self) -> &'static str {
        "remote"
    }

    fn offers(&self) -> BackendFuture<'_, Vec<Offer>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    fn create<'a>(&'a self, order: &'a InstanceRequest) -> BackendFuture<'a, BackendInstance> {
        assert!(matches!(order.want, InstanceSource::Host(_)), "only SSH hosts are here");
        if self.created.fetch_add(1, Ordering::SeqCst) == 0 {
            self.query_fails.store(true, Ordering::SeqCst);
        }
        let machine = BackendInstance {
            id: order.instance.to_string(),
            reach: Some(AgentEndpoint::Socket { path: "/dev/null".into() }),
            hostname: None,
            internal_ip: None,
            has: None,
            agent_version: None,
            memo: Value::Null,
        };
        Box::pin(async { Ok(machine) })
    }

    fn find<'a>(
        &'a self,
        _order: &'a InstanceRequest,
        machine: &'a BackendInstance,
    ) -> BackendFuture<'a, InstanceState> {
        Box::pin(async { Ok(InstanceState::Running(machine.clone())) })
    }

    fn delete<'a>(
        &'a self,
        _order: &'a InstanceRequest,
        _machine: Option<&'a BackendInstance>,
    ) -> BackendFuture<'a, DeleteProgress> {
        Box::pin(async { Ok(DeleteProgress::Gone) })
    }
}

/// Fails one query when the flag is set.
struct FailingQueryFault(Arc<AtomicBool>);

impl FaultHook for FailingQueryFault {
    fn before<'a>(&'a self, what: &'static str) -> HookFuture<'a> {
        let fails = what == "query" && self.0.swap(false, Ordering::SeqCst);
        Box::pin(async move {
            match fails {
                true => Err(DbError::Unavailable { what, source: Arc::new(io::Error::other("cut off")) }),
                false => Ok(()),
            }
        })
    }

    fn after<'a>(&'a self, _what: &'static str) -> HookFuture<'a> {
        Box::pin(async { Ok(()) })
    }
}

/// Starts only the `instances` pipeline, so that no other pipeline consumes the failing query.
struct InstancesOnlyRegistry<'a>(&'a mut Engine<Db>);

impl PipelineRegistry for InstancesOnlyRegistry<'_> {
    fn add<P: Pipeline>(&mut self, pipeline: P) {
        if pipeline.queue().pipeline == "instances" {
            self.0.spawn(pipeline, Settings::standard(1));
        }
    }

    fn add_batch<P: BatchPipeline>(&mut self, _pipeline: P) {}
}

fn start_engine(server: &TestServer, backend: &Arc<SshBackend>) -> Engine<Db> {
    let app = &server.app;
    let db = app.db().with_fault_hook(Arc::new(FailingQueryFault(Arc::clone(&backend.query_fails))));
    let context = PipelineContext {
        db: db.clone(),
        agents: Arc::new(ScriptedHosts::default()) as Arc<dyn AgentApi>,
        backends: Backends::new([Arc::clone(backend) as Arc<dyn Backend>]),
        logs: Arc::clone(app.logs()),
        keys: Arc::clone(app.keys()),
        shapes: RunSpecCache::default(),
        lost_after: app.settings().lost_after,
        retry_delay: app.settings().retry_delay,
        job_limits: app.settings().job_limits,
        images: Default::default(),
        local_processes: Default::default(),
        limits: app.settings().limits.clone(),
    };
    let mut engine = Engine::new(Arc::new(db), Hints::new());
    pipelines::register_all(&context, &mut InstancesOnlyRegistry(&mut engine));
    engine
}

fn private_key() -> String {
    let key = ssh_key::PrivateKey::from(ssh_key::private::Ed25519Keypair::from_seed(&[7; 32]));
    key.to_openssh(ssh_key::LineEnding::LF).unwrap().to_string()
}

async fn m8_a_failed_query_during_host_setup_does_not_terminate_the_host(ground: &ServerFixture) {
    let server = ground.start().await;
    let backend = Arc::new(SshBackend { created: AtomicUsize::new(0), query_fails: Arc::default() });
    let spec = json!({"profile": {"name": "default"}, "configuration": {"type": "fleet", "name": "hosts",
        "ssh_config": {"user": "ubuntu", "hosts": ["10.4.0.7"],
            "ssh_key": {"public": "ssh-ed25519 AAAA", "private": private_key()}}}});
    server.admin("/api/project/main/fleets/apply", json!({"plan": {"spec": spec}, "force": true})).await;
    let engine = start_engine(&server, &backend);
    let start = std::time::Instant::now();
    loop {
        let fleet = server.admin("/api/project/main/fleets/get", json!({"name": "hosts"})).await;
        let status = &fleet["instances"][0]["status"];
        if status == "idle" {
            break;
        }
        let is_starting = status == "pending" || status == "provisioning";
        assert!(is_starting && start.elapsed() < TIMEOUT, "the host never gets idle: {fleet:#}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(backend.created.load(Ordering::SeqCst), 2, "the query failed, and the pass was repeated");
    engine.stop(STOP_GRACE).await;
    server.stop().await;
}
