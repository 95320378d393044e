//! A small cloud, and the agents of its instances, controlled by a test.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use serde_json::{Value, json};
use windlass_backend::{
    AgentEndpoint, Backend, BackendError, BackendInstance, Backends, DeleteProgress, InstanceRequest,
    InstanceSource, InstanceState,
};
use windlass_model::{
    id::InstanceId,
    money::Price,
    plan::offers::{Availability, HostSpec, Offer},
};
use windlass_server::{
    agents::AgentApi,
    db::{Db, Unit},
    hints::Hint,
    params,
    running_pipelines::{self, RunningPipelines},
};
use windlass_testkit::wait::{TIMEOUT, eventually_ok_async};

use crate::{
    http::{ServerFixture, TestServer},
    scripted_hosts::ScriptedHosts,
};

pub(crate) fn offer(backend: &str, name: &str, cpus: u32, dollars: f64) -> Offer {
    Offer {
        backend: backend.into(),
        region: "here".into(),
        zones: Vec::new(),
        instance_type: name.into(),
        price: Price::from_dollars(dollars),
        availability: Availability::Available,
        reservation: None,
        host: HostSpec {
            cpus,
            arch: None,
            memory_mib: 64 << 10,
            disk_mib: 0,
            gpus: Vec::new(),
            spot: name.contains("spot"),
            runtimes: None,
        },
        total_blocks: 1,
    }
}

/// Record of a cloud's actions, and its script.
#[derive(Default)]
pub(crate) struct CloudState {
    pub(crate) made: BTreeMap<InstanceId, String>,
    /// Every call of `create`: instance and type.
    pub(crate) requested: Vec<(InstanceId, String)>,
    pub(crate) deleted: Vec<InstanceId>,
    /// Types without capacity.
    pub(crate) none_of: BTreeSet<String>,
    /// Instances that the cloud reclaimed.
    pub(crate) taken_back: BTreeSet<InstanceId>,
    /// Number of creations that lose their row's lock before they return.
    pub(crate) lose_locks: usize,
    /// Creations wait while this is set.
    pub(crate) hold: bool,
}

pub(crate) struct FakeCloud {
    name: &'static str,
    offers: Vec<Offer>,
    pub(crate) book: Mutex<CloudState>,
    db: Db,
}

impl FakeCloud {
    pub(crate) fn new(name: &'static str, db: &Db, offers: Vec<Offer>) -> Arc<Self> {
        Arc::new(Self { name, offers, book: Mutex::default(), db: db.clone() })
    }

    fn machine(&self, id: InstanceId) -> BackendInstance {
        BackendInstance {
            id: id.to_string(),
            reach: Some(AgentEndpoint::Socket { path: "/dev/null".into() }),
            hostname: Some(format!("host-{id}")),
            internal_ip: None,
            has: None,
            agent_version: None,
            memo: Value::Null,
        }
    }
}

type BackendFuture<'a, T> = windlass_backend::BackendFuture<'a, T>;

impl Backend for FakeCloud {
    fn name(&self) -> &'static str {
        self.name
    }

    fn offers(&self) -> BackendFuture<'_, Vec<Offer>> {
        Box::pin(async { Ok(self.offers.clone()) })
    }

    fn create<'a>(&'a self, order: &'a InstanceRequest) -> BackendFuture<'a, BackendInstance> {
        Box::pin(async move {
            let InstanceSource::Offer(offer) = &order.want else { panic!("no SSH hosts here") };
            while self.book.lock().hold {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let lost = {
                let mut book = self.book.lock();
                book.requested.push((order.instance, offer.instance_type.clone()));
                if book.none_of.contains(&offer.instance_type) && !book.made.contains_key(&order.instance) {
                    return Err(BackendError::NoCapacity { message: format!("no {}", offer.instance_type) });
                }
                book.made.entry(order.instance).or_insert_with(|| offer.instance_type.clone());
                let lost = book.lose_locks > 0;
                book.lose_locks = book.lose_locks.saturating_sub(1);
                lost
            };
            if lost {
                let sql = "UPDATE instances SET lock_token = NULL, lock_expires_at = NULL, lock_owner = NULL, \
                           due_at = NULL WHERE id = $1";
                let unit = Unit::new().exec(sql, params![order.instance]);
                self.db.write(unit).await.unwrap().done().unwrap();
            }
            Ok(self.machine(order.instance))
        })
    }

    fn find<'a>(
        &'a self,
        _order: &'a InstanceRequest,
        machine: &'a BackendInstance,
    ) -> BackendFuture<'a, InstanceState> {
        let book = self.book.lock();
        let is_ours = |id: &InstanceId| id.to_string() == machine.id;
        let gone = book.taken_back.iter().any(is_ours) || !book.made.keys().any(is_ours);
        let found = if gone {
            InstanceState::Gone { message: "taken back".into() }
        } else {
            InstanceState::Running(machine.clone())
        };
        Box::pin(std::future::ready(Ok(found)))
    }

    fn delete<'a>(
        &'a self,
        order: &'a InstanceRequest,
        _machine: Option<&'a BackendInstance>,
    ) -> BackendFuture<'a, DeleteProgress> {
        let mut book = self.book.lock();
        book.made.remove(&order.instance);
        book.deleted.push(order.instance);
        Box::pin(std::future::ready(Ok(DeleteProgress::Gone)))
    }
}

/// A server with running pipelines, fake clouds and scripted agents.
pub(crate) struct FleetTestEnv {
    pub(crate) server: TestServer,
    pub(crate) hosts: Arc<ScriptedHosts>,
    running: Vec<RunningPipelines>,
}

impl FleetTestEnv {
    /// Creates `clouds` on the server's database and starts `replicas` engines.
    pub(crate) async fn set(
        ground: &ServerFixture,
        replicas: usize,
        clouds: impl FnOnce(&Db) -> Vec<Arc<FakeCloud>>,
    ) -> (Self, Vec<Arc<FakeCloud>>) {
        let server = ground.start().await;
        let clouds = clouds(server.app.db());
        for cloud in &clouds {
            server.grant("main", cloud.name).await;
        }
        let hosts = Arc::new(ScriptedHosts::default());
        let backends = || Backends::new(clouds.iter().map(|cloud| Arc::clone(cloud) as Arc<dyn Backend>));
        let agents = Arc::clone(&hosts) as Arc<dyn AgentApi>;
        let start = |_| running_pipelines::start(&server.app, Arc::clone(&agents), backends()).unwrap();
        let running = (0..replicas).map(start).collect();
        (Self { server, hosts, running }, clouds)
    }

    pub(crate) async fn fleet(&self, name: &str, more: Value) -> Value {
        let mut configuration = json!({"type": "fleet", "name": name, "nodes": {"min": 0}});
        configuration.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let spec = json!({"configuration": configuration, "profile": {"name": "default"}});
        let body = json!({"plan": {"spec": spec}, "force": true});
        self.server.admin("/api/project/main/fleets/apply", body).await
    }

    pub(crate) async fn run(&self, name: &str, more: Value) {
        let mut configuration = json!({"type": "task", "name": name, "image": "busybox", "user": "root",
            "commands": ["work"], "resources": {"cpu": "1..", "memory": "1GB..", "disk": "1GB.."}});
        configuration.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let spec = json!({"run_name": name, "configuration": configuration, "profile": {"name": "default"}});
        let body = json!({"plan": {"run_spec": spec}, "force": false});
        self.server.admin("/api/project/main/runs/apply", body).await;
    }

    pub(crate) async fn stop_run(&self, name: &str) {
        let body = json!({"runs_names": [name], "abort": false});
        self.server.admin("/api/project/main/runs/stop", body).await;
    }

    pub(crate) async fn wait_for_run(&self, name: &str, wanted: &str) -> Value {
        let path = "/api/project/main/runs/get";
        self.until(&format!("run {name} {wanted}"), path, json!({"run_name": name}), |seen| {
            seen["status"] == wanted
        })
        .await
    }

    pub(crate) async fn get_fleet(&self, name: &str) -> Value {
        self.server.admin("/api/project/main/fleets/get", json!({"name": name})).await
    }

    /// Waits until the fleet's instances have these statuses, in the order of their numbers.
    pub(crate) async fn wait_for_instances(&self, fleet: &str, wanted: &[&str]) -> Vec<Value> {
        let what = format!("instances of {fleet} {wanted:?}");
        let path = "/api/project/main/fleets/get";
        let seen = self.until(&what, path, json!({"name": fleet}), |seen| statuses(seen) == wanted).await;
        seen["instances"].as_array().unwrap().clone()
    }

    /// Waits until the fleet's pipeline has found it complete.
    pub(crate) async fn wait_for_fleet(&self, fleet: &str) {
        let start = Instant::now();
        let sql = "SELECT consolidation_attempt FROM fleets WHERE name = $1";
        while self.server.app.db().query(sql, params![fleet]).await.unwrap()[0].int(0).unwrap() != 0 {
            assert!(start.elapsed() < TIMEOUT, "{fleet} never stands: {:#}", self.get_fleet(fleet).await);
            self.mark_due("fleets").await;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub(crate) async fn until(
        &self,
        what: &str,
        path: &str,
        body: Value,
        is: impl Fn(&Value) -> bool,
    ) -> Value {
        eventually_ok_async(what, async || {
            let seen = self.server.admin(path, body.clone()).await;
            if is(&seen) { Ok(seen) } else { Err(seen) }
        })
        .await
    }

    /// Makes every row of a table due.
    pub(crate) async fn mark_due(&self, table: &'static str) {
        let unit = Unit::new().exec(format!("UPDATE {table} SET due_at = NULL WHERE NOT finished"), vec![]);
        self.server.app.db().write(unit).await.unwrap().done().unwrap();
        self.server.app.wake(&[
            Hint::Runs,
            Hint::JobsRunning,
            Hint::JobsSubmitted,
            Hint::Instances,
            Hint::Fleets,
        ]);
    }

    pub(crate) async fn stop(self) {
        for running in self.running {
            running.stop().await;
        }
        self.server.stop().await;
    }
}

fn statuses(fleet: &Value) -> Vec<&str> {
    let instances = fleet["instances"].as_array().into_iter().flatten();
    instances.map(|one| one["status"].as_str().unwrap_or_default()).collect()
}

pub(crate) fn instance_id(instance: &Value) -> InstanceId {
    InstanceId(instance["id"].as_str().unwrap().parse().unwrap())
}
