//! Network volumes on a scripted backend: created and deleted, attached and detached.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures_util::future::ready;
use parking_lot::Mutex;
use serde_json::json;
use windlass_backend::{
    Backend, BackendError, BackendFuture, BackendInstance, Backends, DeleteProgress, InstanceRequest,
    InstanceState,
    volumes::{Attachment, AttachmentState, BackendVolume as Disk, VolumeBackend, VolumeRequest},
};
use windlass_engine::{BatchPipeline, Engine, Hints, Lease, LeaseStore, Pipeline, Queue, Settings};
use windlass_model::{
    decide::jobs_terminating as ending,
    id::{FleetId, InstanceId, SubmissionId, VolumeId},
    plan::offers::Offer,
    volume,
};
use windlass_server::{
    agents::NoAgents,
    attachments::{self, AttachProgress},
    db::{Db, Unit, Val, instances, jobs, pipeline_rows, volumes},
    encryption::Keyring,
    logs::{files::FileLogStore, notifying_store::NotifyingLogStore},
    params,
    parsed_run_spec::RunSpecCache,
    pipelines::{self, PipelineContext, PipelineRegistry},
};
use windlass_testkit::wait::eventually_ok_async;
use windlass_testkit::{TempDir, temp_dir};

use crate::{
    db::on_both,
    db_fixtures::{self, TestOwner},
};

on_both! {
    a_volume_is_created_and_becomes_active
    a_volume_refused_by_its_backend_fails_with_the_reason
    a_volume_of_an_unknown_backend_fails_and_can_be_deleted_unless_created
    g4_a_volume_in_use_is_deleted_only_after_it_is_detached
    an_unused_volume_is_cleaned_up_and_a_used_one_is_not
    deleting_an_external_volume_keeps_its_disk
    a_job_has_its_volumes_attached_before_its_task_starts
    a_job_without_network_volumes_attaches_nothing
    a_volume_that_cannot_be_attached_fails_its_job_with_the_reason
    g4_a_volume_is_attached_to_one_instance_at_a_time
    jobs_on_one_instance_share_an_attachment_and_the_last_one_detaches_it
    r24_a_hanging_attachment_is_released_before_another_job_takes_it
    a_hanging_detach_is_retried_and_then_forced
    a_stale_job_lease_attaches_no_volume
}

/// Script of the backend.
#[derive(Default)]
struct VolumeBackendScript {
    refuses_to_make: bool,
    refuses_to_attach: bool,
    /// Requested attachments never complete.
    never_attaches: bool,
    /// Detaching without force never completes.
    hangs: bool,
}

#[derive(Default)]
struct ScriptedState {
    script: VolumeBackendScript,
    disks: BTreeMap<String, VolumeId>,
    attached: BTreeSet<(String, String)>,
    /// Volume, and whether by force.
    detaches: Vec<(String, bool)>,
}

#[derive(Clone, Default)]
struct ScriptedVolumeBackend(Arc<Mutex<ScriptedState>>);

impl ScriptedVolumeBackend {
    fn backends(&self) -> Backends {
        Backends::new([Arc::new(self.clone()) as Arc<dyn Backend>])
    }
}

fn refused_answer<'a, T: Send + 'a>(message: &str) -> BackendFuture<'a, T> {
    Box::pin(ready(Err(BackendError::Refused { what: "ask the shelf", message: message.to_owned() })))
}

fn ok_answer<'a, T: Send + 'a>(answer: T) -> BackendFuture<'a, T> {
    Box::pin(ready(Ok(answer)))
}

impl Backend for ScriptedVolumeBackend {
    fn name(&self) -> &'static str {
        "mock"
    }
    fn offers(&self) -> BackendFuture<'_, Vec<Offer>> {
        ok_answer(Vec::new())
    }
    fn create<'a>(&'a self, _order: &'a InstanceRequest) -> BackendFuture<'a, BackendInstance> {
        refused_answer("no machines here")
    }
    fn find<'a>(
        &'a self,
        _order: &'a InstanceRequest,
        machine: &'a BackendInstance,
    ) -> BackendFuture<'a, InstanceState> {
        ok_answer(InstanceState::Running(machine.clone()))
    }
    fn delete<'a>(
        &'a self,
        _order: &'a InstanceRequest,
        _machine: Option<&'a BackendInstance>,
    ) -> BackendFuture<'a, DeleteProgress> {
        ok_answer(DeleteProgress::Gone)
    }
    fn volumes(&self) -> Option<&dyn VolumeBackend> {
        Some(self)
    }
}

impl VolumeBackend for ScriptedVolumeBackend {
    fn make<'a>(&'a self, order: &'a VolumeRequest) -> BackendFuture<'a, Disk> {
        let mut state = self.0.lock();
        if state.script.refuses_to_make {
            return refused_answer("the quota is used up");
        }
        let id = order.external.clone().unwrap_or_else(|| format!("disk-{}", order.volume));
        state.disks.insert(id.clone(), order.volume);
        let zone = Some("here-a".to_owned());
        ok_answer(Disk { id, size_gb: order.size_gb, zone, price: Some(1.5), ready: true })
    }
    fn get<'a>(&'a self, order: &'a VolumeRequest, _id: &'a str) -> BackendFuture<'a, Option<Disk>> {
        let made = self.make(order);
        Box::pin(async move { made.await.map(Some) })
    }
    fn remove<'a>(&'a self, _order: &'a VolumeRequest, id: &'a str) -> BackendFuture<'a, ()> {
        let mut state = self.0.lock();
        if state.attached.iter().any(|(disk, _)| disk == id) {
            return refused_answer("it is attached");
        }
        state.disks.remove(id);
        ok_answer(())
    }
    fn attach<'a>(&'a self, id: &'a str, machine: &'a BackendInstance) -> BackendFuture<'a, AttachmentState> {
        let mut state = self.0.lock();
        if state.script.refuses_to_attach {
            return refused_answer("the disk is of another kind");
        }
        state.attached.insert((id.to_owned(), machine.id.clone()));
        if state.script.never_attaches {
            return ok_answer(AttachmentState::Coming);
        }
        ok_answer(AttachmentState::Yes(Attachment { device_name: Some("/dev/sdf".into()) }))
    }
    fn detach<'a>(&'a self, id: &'a str, machine: &'a BackendInstance, force: bool) -> BackendFuture<'a, ()> {
        let mut state = self.0.lock();
        state.detaches.push((id.to_owned(), force));
        if force || !state.script.hangs {
            state.attached.remove(&(id.to_owned(), machine.id.clone()));
        }
        ok_answer(())
    }
    fn attached<'a>(
        &'a self,
        id: &'a str,
        machine: &'a BackendInstance,
    ) -> BackendFuture<'a, AttachmentState> {
        let there = self.0.lock().attached.contains(&(id.to_owned(), machine.id.clone()));
        ok_answer(if there { AttachmentState::Yes(Attachment::default()) } else { AttachmentState::No })
    }
}

/// Installs a single pipeline.
struct SinglePipelineRegistry<'a> {
    engine: &'a mut Engine<Db>,
    pipeline: &'static str,
}

impl PipelineRegistry for SinglePipelineRegistry<'_> {
    fn add<P: Pipeline>(&mut self, pipeline: P) {
        if pipeline.queue().pipeline == self.pipeline {
            self.engine.spawn(pipeline, Settings::standard(7));
        }
    }
    fn add_batch<P: BatchPipeline>(&mut self, _pipeline: P) {}
}

/// The running `volumes` pipeline.
struct RunningPipeline {
    engine: Engine<Db>,
    _logs: TempDir,
}

fn start_pipeline(db: &Db, volumes: &ScriptedVolumeBackend) -> RunningPipeline {
    let logs = temp_dir("logs").unwrap();
    let context = PipelineContext {
        db: db.clone(),
        agents: Arc::new(NoAgents),
        backends: volumes.backends(),
        logs: Arc::new(NotifyingLogStore::new(Arc::new(FileLogStore::new(logs.path().to_owned())))),
        keys: Arc::new(Keyring::ephemeral().unwrap()),
        shapes: RunSpecCache::default(),
        lost_after: windlass_model::decide::jobs_running::UNREACHABLE_GRACE,
        retry_delay: windlass_model::retry::DELAY_FIRST,
        job_limits: windlass_model::decide::managed_jobs::slots::SlotLimits::for_host(2, 4096),
        images: Default::default(),
        local_processes: Default::default(),
        limits: windlass_server::limits::Limits::default(),
    };
    let mut engine = Engine::new(Arc::new(db.clone()), Hints::new());
    pipelines::register_all(
        &context,
        &mut SinglePipelineRegistry { engine: &mut engine, pipeline: "volumes" },
    );
    RunningPipeline { engine, _logs: logs }
}

async fn write(db: &Db, unit: Unit) {
    db.write(unit).await.unwrap().done().unwrap();
}

/// A volume of 10 GB on the scripted backend.
async fn insert_volume(db: &Db, made: &TestOwner, name: &str, more: serde_json::Value) -> VolumeId {
    let id = VolumeId(db.new_id().unwrap());
    let mut configuration = json!({"type": "volume", "name": name, "backend": "mock", "region": "here"});
    configuration.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let new = volumes::NewVolume {
        id,
        project_id: made.project,
        user_id: made.user,
        name: name.into(),
        external: !configuration["volume_id"].is_null(),
        configuration: configuration.to_string(),
        status: volume::Status::Submitted,
    };
    write(db, Unit::new().and([volumes::insert(new)])).await;
    id
}

fn ten_gb() -> serde_json::Value {
    json!({"size": "10GB"})
}

/// A volume that was created before.
async fn insert_active_volume(
    db: &Db,
    made: &TestOwner,
    volumes: &ScriptedVolumeBackend,
    name: &str,
) -> VolumeId {
    let id = insert_volume(db, made, name, ten_gb()).await;
    volumes.0.lock().disks.insert(format!("disk-{id}"), id);
    let sql = "UPDATE volumes SET status = 'active', volume_id = $2 WHERE id = $1";
    write(db, Unit::new().exec(sql, params![id, format!("disk-{id}")])).await;
    id
}

async fn insert_instance(db: &Db, made: &TestOwner, name: &str) -> InstanceId {
    let id = InstanceId(db.new_id().unwrap());
    let machine = json!({"id": format!("vm-{name}"), "reach": null, "hostname": null, "internal_ip": null,
        "has": null, "agent_version": null, "memo": null});
    let values = vec![
        ("id", id.into()),
        ("project_id", made.project.into()),
        ("fleet_id", None::<FleetId>.into()),
        ("name", name.into()),
        ("instance_num", 0_i64.into()),
        ("backend", "mock".into()),
        ("region", "here".into()),
        ("provisioning", machine.to_string().into()),
        ("status", "idle".into()),
        ("created_at", Val::Now),
        ("last_processed_at", Val::Now),
    ];
    write(db, Unit::new().insert("instances", values)).await;
    id
}

/// A job on an instance that needs these volumes, with the lease on the job.
struct LeasedJob {
    job: jobs::Job,
    instance: instances::Instance,
    lease: Lease,
}

const JOBS_QUEUE: Queue = Queue { pipeline: "test", table: "jobs", statuses: &["provisioning"] };

async fn insert_leased_job(
    db: &Db,
    made: &TestOwner,
    name: &str,
    at: InstanceId,
    mounts: serde_json::Value,
) -> LeasedJob {
    let run = db_fixtures::insert_run(db, made, name).await;
    let id = SubmissionId(db.new_id().unwrap());
    let values = vec![
        ("id", id.into()),
        ("run_id", run.into()),
        ("project_id", made.project.into()),
        ("job_name", name.into()),
        ("replica_num", 0_i64.into()),
        ("job_num", 0_i64.into()),
        ("submission_num", 0_i64.into()),
        ("status", "provisioning".into()),
        ("job_spec", json!({ "volumes": mounts }).to_string().into()),
        ("instance_id", at.into()),
        ("submitted_at", Val::Now),
        ("last_processed_at", Val::Now),
    ];
    write(db, Unit::new().insert("jobs", values)).await;
    let claim = db.claim(&JOBS_QUEUE, 10, Duration::from_secs(60)).await.unwrap();
    let lease = claim.leases.into_iter().find(|lease| lease.id == id.0).unwrap();
    let loaded = pipeline_rows::jobs::load(db, &lease).await.unwrap().unwrap();
    LeasedJob { job: loaded.job, instance: loaded.instance.unwrap(), lease }
}

fn mounts_at(path: &str, names: &[&str]) -> serde_json::Value {
    json!([{ "name": names, "path": path }])
}

impl LeasedJob {
    async fn attach(&self, db: &Db, volumes: &ScriptedVolumeBackend) -> AttachProgress {
        attachments::attach(db, &volumes.backends(), &self.lease, &self.job, &self.instance).await.unwrap()
    }

    async fn state(&self, db: &Db, volumes: &ScriptedVolumeBackend) -> Vec<ending::VolumeAttachment> {
        let backends = volumes.backends();
        attachments::remaining_volumes(db, &backends, &self.lease, &self.job, Some(&self.instance))
            .await
            .unwrap()
    }

    async fn detach(
        &self,
        db: &Db,
        backend: &ScriptedVolumeBackend,
        volume: VolumeId,
        force: bool,
    ) -> Vec<ending::VolumeAttachment> {
        let (backends, volumes) = (backend.backends(), [volume]);
        attachments::detach(db, &backends, &self.lease, &self.job, &self.instance, &volumes, force)
            .await
            .unwrap()
    }
}

async fn wait_until(db: &Db, id: VolumeId, what: impl Fn(&volumes::Volume) -> bool) -> volumes::Volume {
    eventually_ok_async("the volume changes", async || {
        let seen = volumes::find(db, id).await.unwrap().unwrap();
        if what(&seen) { Ok(seen) } else { Err(format!("{seen:?}")) }
    })
    .await
}

async fn list_events(db: &Db, id: VolumeId) -> Vec<(String, Option<String>)> {
    let sql = "SELECT message, to_status FROM events WHERE entity_id = $1 ORDER BY seq";
    let rows = db.query(sql, params![id]).await.unwrap();
    rows.iter().map(|row| (row.text(0).unwrap(), row.opt_text(1).unwrap())).collect()
}

async fn a_volume_is_created_and_becomes_active(db: &Db) {
    let (made, volumes) = (db_fixtures::create_owner(db).await, ScriptedVolumeBackend::default());
    let turning = start_pipeline(db, &volumes);
    let id = insert_volume(db, &made, "data", ten_gb()).await;
    turning.engine.hints().hint("volumes");
    let seen = wait_until(db, id, |seen| seen.status == volume::Status::Active).await;
    assert_eq!(seen.volume_id, Some(format!("disk-{id}")));
    let document: serde_json::Value = serde_json::from_str(&seen.provisioning.unwrap()).unwrap();
    assert_eq!((&document["size_gb"], &document["price"]), (&json!(10.0), &json!(1.5)));
    assert_eq!(list_events(db, id).await, [("ready to be attached".to_owned(), Some("active".to_owned()))]);
    turning.engine.stop(Duration::from_secs(5)).await;
}

async fn a_volume_refused_by_its_backend_fails_with_the_reason(db: &Db) {
    let (made, volumes) = (db_fixtures::create_owner(db).await, ScriptedVolumeBackend::default());
    volumes.0.lock().script.refuses_to_make = true;
    let turning = start_pipeline(db, &volumes);
    let id = insert_volume(db, &made, "data", ten_gb()).await;
    turning.engine.hints().hint("volumes");
    let seen = wait_until(db, id, |seen| seen.status == volume::Status::Failed).await;
    assert!(seen.status_message.unwrap().contains("quota"), "it says why");
    // A failed volume can be deleted all the same.
    write(db, Unit::new().and(volumes::request_delete(id))).await;
    turning.engine.hints().hint("volumes");
    wait_until(db, id, |seen| seen.deleted).await;
    turning.engine.stop(Duration::from_secs(5)).await;
}

async fn a_volume_of_an_unknown_backend_fails_and_can_be_deleted_unless_created(db: &Db) {
    let (made, volumes) = (db_fixtures::create_owner(db).await, ScriptedVolumeBackend::default());
    let turning = start_pipeline(db, &volumes);
    let elsewhere = || json!({"size": "10GB", "backend": "aws"});
    let ids = [
        insert_volume(db, &made, "never", elsewhere()).await,
        insert_volume(db, &made, "once", elsewhere()).await,
    ];
    turning.engine.hints().hint("volumes");
    for id in ids {
        let seen = wait_until(db, id, |seen| seen.status == volume::Status::Failed).await;
        assert!(seen.status_message.unwrap().contains("not configured"), "it says why");
    }
    write(db, Unit::new().exec("UPDATE volumes SET volume_id = 'vol-1' WHERE id = $1", params![ids[1]]))
        .await;
    for id in ids {
        write(db, Unit::new().and(volumes::request_delete(id))).await;
    }
    turning.engine.hints().hint("volumes");
    wait_until(db, ids[0], |seen| seen.deleted).await;
    let waits = |seen: &volumes::Volume| {
        seen.status_message.as_deref().is_some_and(|message| message.starts_with("not deleted yet"))
    };
    assert!(!wait_until(db, ids[1], waits).await.deleted, "its backend still has it");
    turning.engine.stop(Duration::from_secs(5)).await;
}

async fn g4_a_volume_in_use_is_deleted_only_after_it_is_detached(db: &Db) {
    let (made, volumes) = (db_fixtures::create_owner(db).await, ScriptedVolumeBackend::default());
    let id = insert_active_volume(db, &made, &volumes, "data").await;
    let host = insert_instance(db, &made, "one").await;
    let work = insert_leased_job(db, &made, "train", host, mounts_at("/data", &["data"])).await;
    assert!(matches!(work.attach(db, &volumes).await, AttachProgress::Ready(_)));
    // A request to delete is refused now; one from a moment before waits.
    assert!(!db.write(Unit::new().and(volumes::request_delete(id))).await.unwrap().is_done());
    write(db, Unit::new().exec("UPDATE volumes SET delete_asked_at = now_us() WHERE id = $1", params![id]))
        .await;
    let turning = start_pipeline(db, &volumes);
    let before = volumes::find(db, id).await.unwrap().unwrap().last_processed_at;
    wait_until(db, id, |seen| seen.last_processed_at > before).await;
    assert!(!volumes::find(db, id).await.unwrap().unwrap().deleted, "it is in use");
    assert!(work.detach(db, &volumes, id, false).await.is_empty());
    turning.engine.hints().hint("volumes");
    wait_until(db, id, |seen| seen.deleted).await;
    assert!(volumes.0.lock().disks.is_empty());
    turning.engine.stop(Duration::from_secs(5)).await;
}

async fn an_unused_volume_is_cleaned_up_and_a_used_one_is_not(db: &Db) {
    let (made, volumes) = (db_fixtures::create_owner(db).await, ScriptedVolumeBackend::default());
    let brief = json!({"size": "10GB", "auto_cleanup_duration": "1s"});
    let (used, unused) = (
        insert_volume(db, &made, "used", brief.clone()).await,
        insert_volume(db, &made, "unused", brief).await,
    );
    let kept = insert_volume(db, &made, "kept", ten_gb()).await;
    let sql =
        "UPDATE volumes SET status = 'active', volume_id = name, last_job_processed_at = now_us() - 5000000";
    write(db, Unit::new().exec(sql, vec![])).await;
    let host = insert_instance(db, &made, "one").await;
    let work = insert_leased_job(db, &made, "train", host, mounts_at("/data", &["used"])).await;
    assert!(matches!(work.attach(db, &volumes).await, AttachProgress::Ready(_)));
    let turning = start_pipeline(db, &volumes);
    wait_until(db, unused, |seen| seen.deleted).await;
    let reported = list_events(db, unused).await;
    assert!(reported[0].0.starts_with("unattached for"), "{reported:?}");
    for (id, name) in [(used, "used"), (kept, "kept")] {
        let seen = volumes::find(db, id).await.unwrap().unwrap();
        assert!(!seen.deleted && seen.delete_asked_at.is_none(), "{name} stays");
    }
    turning.engine.stop(Duration::from_secs(5)).await;
}

async fn deleting_an_external_volume_keeps_its_disk(db: &Db) {
    let (made, volumes) = (db_fixtures::create_owner(db).await, ScriptedVolumeBackend::default());
    let turning = start_pipeline(db, &volumes);
    let id = insert_volume(db, &made, "data", json!({"volume_id": "vol-7"})).await;
    turning.engine.hints().hint("volumes");
    wait_until(db, id, |seen| seen.status == volume::Status::Active).await;
    write(db, Unit::new().and(volumes::request_delete(id))).await;
    turning.engine.hints().hint("volumes");
    wait_until(db, id, |seen| seen.deleted).await;
    assert!(volumes.0.lock().disks.contains_key("vol-7"));
    turning.engine.stop(Duration::from_secs(5)).await;
}

async fn a_job_has_its_volumes_attached_before_its_task_starts(db: &Db) {
    let (made, volumes) = (db_fixtures::create_owner(db).await, ScriptedVolumeBackend::default());
    let id = insert_active_volume(db, &made, &volumes, "data").await;
    let host = insert_instance(db, &made, "one").await;
    // The first of the names does not exist: the second is used.
    let work = insert_leased_job(db, &made, "train", host, mounts_at("/data", &["nothing", "data"])).await;
    for _ in 0..2 {
        let AttachProgress::Ready(mounts) = work.attach(db, &volumes).await else {
            panic!("it is not attached")
        };
        let reported = serde_json::to_value((&mounts.volumes, &mounts.volume_mounts)).unwrap();
        let expected = json!([
            [{"backend": "mock", "name": "data", "volume_id": format!("disk-{id}"), "init_fs": true,
              "device_name": "/dev/sdf"}],
            [{"name": "data", "path": "/data"}]
        ]);
        assert_eq!(reported, expected);
    }
    assert_eq!(volumes.0.lock().attached, BTreeSet::from([(format!("disk-{id}"), "vm-one".to_owned())]));
    assert_eq!(volumes::attachments(db, &[id]).await.unwrap().len(), 1);
    let state = work.state(db, &volumes).await;
    assert_eq!(
        state,
        [ending::VolumeAttachment { id, detach_requested_at: None, is_forced: false, is_attached: true }]
    );
    assert!(work.detach(db, &volumes, id, false).await.is_empty());
    assert!(
        volumes.0.lock().attached.is_empty() && volumes::attachments(db, &[id]).await.unwrap().is_empty()
    );
}

async fn a_job_without_network_volumes_attaches_nothing(db: &Db) {
    let (made, volumes) = (db_fixtures::create_owner(db).await, ScriptedVolumeBackend::default());
    let host = insert_instance(db, &made, "one").await;
    let mounts = json!([{"instance_path": "/mnt", "path": "/data", "optional": false}]);
    let work = insert_leased_job(db, &made, "train", host, mounts).await;
    assert_eq!(work.attach(db, &volumes).await, AttachProgress::Ready(attachments::TaskMounts::default()));
    assert!(work.state(db, &volumes).await.is_empty());
}

async fn a_volume_that_cannot_be_attached_fails_its_job_with_the_reason(db: &Db) {
    let (made, volumes) = (db_fixtures::create_owner(db).await, ScriptedVolumeBackend::default());
    let id = insert_active_volume(db, &made, &volumes, "data").await;
    let host = insert_instance(db, &made, "one").await;
    let refused = insert_leased_job(db, &made, "refused", host, mounts_at("/data", &["data"])).await;
    volumes.0.lock().script.refuses_to_attach = true;
    let AttachProgress::Failed { message } = refused.attach(db, &volumes).await else {
        panic!("it is attached")
    };
    assert!(
        message.contains("`data` could not be attached") && message.contains("another kind"),
        "{message}"
    );
    // Its volumes are released like any others.
    assert_eq!(refused.state(db, &volumes).await.len(), 1);
    assert!(refused.detach(db, &volumes, id, false).await.is_empty());
    for (name, sql, expected) in [
        ("absent", "UPDATE volumes SET name = 'other' WHERE id = $1", "does not exist"),
        ("failed", "UPDATE volumes SET name = 'data', status = 'failed' WHERE id = $1", "failed"),
        ("going", "UPDATE volumes SET status = 'active', delete_asked_at = 1 WHERE id = $1", "being deleted"),
    ] {
        write(db, Unit::new().exec(sql, params![id])).await;
        let work = insert_leased_job(db, &made, name, host, mounts_at("/data", &["data"])).await;
        let AttachProgress::Failed { message } = work.attach(db, &volumes).await else {
            panic!("it is attached")
        };
        assert!(message.contains(expected), "{name}: {message}");
    }
}

async fn g4_a_volume_is_attached_to_one_instance_at_a_time(db: &Db) {
    let (made, volumes) = (db_fixtures::create_owner(db).await, ScriptedVolumeBackend::default());
    let id = insert_active_volume(db, &made, &volumes, "data").await;
    let (one, two) = (insert_instance(db, &made, "one").await, insert_instance(db, &made, "two").await);
    let first = insert_leased_job(db, &made, "first", one, mounts_at("/data", &["data"])).await;
    let second = insert_leased_job(db, &made, "second", two, mounts_at("/data", &["data"])).await;
    assert!(matches!(first.attach(db, &volumes).await, AttachProgress::Ready(_)));
    let AttachProgress::Failed { message } = second.attach(db, &volumes).await else {
        panic!("it is attached twice")
    };
    assert!(message.contains("attached to one;") && message.contains("one instance at a time"), "{message}");
    // While the volume is being detached, the next job waits.
    volumes.0.lock().script.hangs = true;
    assert_eq!(first.detach(db, &volumes, id, false).await.len(), 1);
    let AttachProgress::Coming { message } = second.attach(db, &volumes).await else {
        panic!("it does not wait")
    };
    assert!(message.contains("still being detached from one"), "{message}");
    volumes.0.lock().script.hangs = false;
    assert!(first.state(db, &volumes).await.is_empty());
    assert!(matches!(second.attach(db, &volumes).await, AttachProgress::Ready(_)));
    assert_eq!(volumes.0.lock().attached.len(), 1);
}

async fn jobs_on_one_instance_share_an_attachment_and_the_last_one_detaches_it(db: &Db) {
    let (made, volumes) = (db_fixtures::create_owner(db).await, ScriptedVolumeBackend::default());
    let id = insert_active_volume(db, &made, &volumes, "data").await;
    let host = insert_instance(db, &made, "one").await;
    let first = insert_leased_job(db, &made, "first", host, mounts_at("/data", &["data"])).await;
    let second = insert_leased_job(db, &made, "second", host, mounts_at("/data", &["data"])).await;
    for work in [&first, &second] {
        assert!(matches!(work.attach(db, &volumes).await, AttachProgress::Ready(_)));
    }
    assert!(first.detach(db, &volumes, id, false).await.is_empty(), "it is no longer its business");
    assert_eq!(volumes.0.lock().attached.len(), 1, "the other one uses it");
    assert!(second.detach(db, &volumes, id, false).await.is_empty());
    assert!(volumes.0.lock().attached.is_empty());
}

async fn r24_a_hanging_attachment_is_released_before_another_job_takes_it(db: &Db) {
    let (made, volumes) = (db_fixtures::create_owner(db).await, ScriptedVolumeBackend::default());
    let id = insert_active_volume(db, &made, &volumes, "data").await;
    let host = insert_instance(db, &made, "one").await;
    volumes.0.lock().script.never_attaches = true;
    let first = insert_leased_job(db, &made, "first", host, mounts_at("/data", &["data"])).await;
    assert!(
        matches!(first.attach(db, &volumes).await, AttachProgress::Coming { .. }),
        "it is given its time"
    );
    let sql = "UPDATE volume_attachments SET attached_at = attached_at - 300000000";
    write(db, Unit::new().exec(sql, vec![])).await;
    let second = insert_leased_job(db, &made, "second", host, mounts_at("/data", &["data"])).await;
    let AttachProgress::Coming { message } = second.attach(db, &volumes).await else {
        panic!("it joins or fails")
    };
    assert!(message.contains("timed out; it is detached first"), "{message}");
    assert!(second.state(db, &volumes).await.is_empty(), "it holds nothing");
    let AttachProgress::Failed { message } = first.attach(db, &volumes).await else {
        panic!("it waits for ever")
    };
    assert!(message.contains("is being attached; timed out after 300 s"), "{message}");
    assert!(first.detach(db, &volumes, id, false).await.is_empty(), "the last one out ends it");
    volumes.0.lock().script.never_attaches = false;
    assert!(matches!(second.attach(db, &volumes).await, AttachProgress::Ready(_)));
}

async fn a_hanging_detach_is_retried_and_then_forced(db: &Db) {
    let (made, volumes) = (db_fixtures::create_owner(db).await, ScriptedVolumeBackend::default());
    let id = insert_active_volume(db, &made, &volumes, "data").await;
    let host = insert_instance(db, &made, "one").await;
    let work = insert_leased_job(db, &made, "train", host, mounts_at("/data", &["data"])).await;
    work.attach(db, &volumes).await;
    volumes.0.lock().script.hangs = true;
    let left = work.detach(db, &volumes, id, false).await;
    assert!(left[0].detach_requested_at.is_some() && !left[0].is_forced, "{left:?}");
    let requested = volumes.0.lock().detaches.len();
    assert_eq!(work.state(db, &volumes).await.len(), 1, "the job has to wait");
    assert!(volumes.0.lock().detaches.len() > requested, "it is asked again");
    assert!(work.detach(db, &volumes, id, true).await.is_empty());
    assert_eq!(volumes.0.lock().detaches.last(), Some(&(format!("disk-{id}"), true)));
    assert!(volumes::attachments(db, &[id]).await.unwrap().is_empty());
}

async fn a_stale_job_lease_attaches_no_volume(db: &Db) {
    let (made, volumes) = (db_fixtures::create_owner(db).await, ScriptedVolumeBackend::default());
    let id = insert_active_volume(db, &made, &volumes, "data").await;
    let host = insert_instance(db, &made, "one").await;
    let mut work = insert_leased_job(db, &made, "train", host, mounts_at("/data", &["data"])).await;
    work.lease.token = db.new_id().unwrap();
    assert!(matches!(work.attach(db, &volumes).await, AttachProgress::Coming { .. }));
    assert!(volumes::attachments(db, &[id]).await.unwrap().is_empty());
    assert!(volumes.0.lock().attached.is_empty());
}
