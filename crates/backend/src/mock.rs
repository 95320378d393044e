//! Scripted cloud for tests and trials: prices, spot, preemption, no capacity, slow boots, network volumes.
//!
//! Its instances are real agents on this machine, so whole runs work on them. Faults are defined in the script. Records
//! are files below a directory: the cloud outlives the server, and all server replicas see the same one. An empty file
//! `preempt/INSTANCE` there preempts an instance, as [`Mock::preempt`] does.

mod faults;
mod ledger;
pub mod script;
mod volumes;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use serde_json::json;
use windlass_api::agent::shim::ProcessMode;
use windlass_model::{backend_kind::BackendType, id::InstanceId, plan::offers::Offer};

use self::{
    ledger::{InstanceRecord, Ledger, now_ms},
    script::{MockRuntime, MockScript, OfferScript},
};
use crate::{
    AgentEndpoint, Backend, BackendError, BackendFuture, BackendInstance, DeleteProgress, InstanceRequest,
    InstanceSource, InstanceState,
    agent_program::AgentProgram,
    shim_process::{HomeLock, Owner, ShimHome, StartOptions},
    volumes::VolumeBackend,
};

pub const NAME: &str = BackendType::Mock.as_str();
/// Length of the prefix of an instance id in directory names, because socket paths must be short.
const SHORT_ID_CHARS: usize = 8;

/// Mock cloud with its records.
pub struct MockCloud {
    script: MockScript,
    dir: PathBuf,
    ledger: Ledger,
    agent: Option<PathBuf>,
}

impl MockCloud {
    /// `agent` is the agent's program, if it is not next to the server's.
    pub fn new(script: MockScript, dir: &Path, agent: Option<PathBuf>) -> Self {
        let dir = std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
        Self { script, ledger: Ledger::new(&dir), dir, agent }
    }

    /// Preempts an instance now, as a cloud does with spot instances.
    pub async fn preempt(&self, instance: InstanceId) -> Result<(), BackendError> {
        let _alone = self.lock_ledger().await?;
        match self.ledger.machine(instance)? {
            Some(made) => self.preempt_recorded(made).await,
            None => Ok(()),
        }
    }

    /// Locks the records against other writers.
    async fn lock_ledger(&self) -> Result<HomeLock, BackendError> {
        Ok(ShimHome::new(&self.dir.join("books")).alone().await?)
    }

    fn home(&self, instance: InstanceId) -> ShimHome {
        ShimHome::new(&self.dir.join(&instance.to_string()[..SHORT_ID_CHARS]))
    }

    fn start_with(&self) -> Result<StartOptions, BackendError> {
        let program = AgentProgram::find(self.agent.as_deref()).map_err(|error| BackendError::Refused {
            what: "start an agent for the mock cloud",
            message: error.to_string(),
        })?;
        let runtime = match self.script.runtime {
            MockRuntime::Simulated => "simulated",
            MockRuntime::Process => "process",
        };
        Ok(StartOptions {
            program,
            runtime,
            docker_socket: None,
            processes: ProcessMode::Own,
            env: Default::default(),
        })
    }

    fn script_for(&self, made: &InstanceRecord) -> Option<&OfferScript> {
        self.script.offers.iter().find(|kind| kind.key() == made.kind)
    }

    async fn made(&self, order: &InstanceRequest) -> Result<BackendInstance, BackendError> {
        let refused = |message: String| BackendError::Refused { what: "create the instance", message };
        let InstanceSource::Offer(offer) = &order.want else {
            return Err(refused("the mock cloud does not support SSH hosts".to_owned()));
        };
        let kind = self.script.kind(&offer.instance_type, &offer.region, offer.host.spot);
        let kind = kind.ok_or_else(|| refused(format!("no {} in {}", offer.instance_type, offer.region)))?;
        let machine = {
            let _alone = self.lock_ledger().await?;
            let made = match self.ledger.machine(order.instance)? {
                Some(made) => made,
                None => {
                    self.check_create()?;
                    if self.ledger.is_among_first(&format!("no capacity {}", kind.key()), kind.no_capacity)? {
                        let message = format!("no {} in {} (scripted)", kind.instance_type, kind.region);
                        return Err(BackendError::NoCapacity { message });
                    }
                    let (made_ms, deletes, preempted) = (now_ms(), 0, false);
                    let made = InstanceRecord {
                        instance: order.instance,
                        kind: kind.key(),
                        made_ms,
                        deletes,
                        preempted,
                    };
                    self.ledger.put_instance(&made)?;
                    self.fail_after_create()?;
                    made
                }
            };
            if made.preempted {
                return Err(BackendError::NoCapacity { message: "the instance was preempted".to_owned() });
            }
            let ready = now_ms() >= made.made_ms + kind.boot_ms;
            if ready { self.ensure_agent(order, &made).await? } else { self.machine(&made, None) }
        };
        tokio::time::sleep(Duration::from_millis(kind.late_ms)).await;
        if self.ledger.is_among_first(&format!("lost answer {}", kind.key()), kind.lost_answers)? {
            let message = "the response was lost (scripted)".to_owned();
            return Err(BackendError::Unavailable { what: "create the instance", message });
        }
        Ok(machine)
    }

    /// Returns the instance, and starts its agent if it does not run.
    async fn ensure_agent(
        &self,
        order: &InstanceRequest,
        made: &InstanceRecord,
    ) -> Result<BackendInstance, BackendError> {
        let (home, with) = (self.home(made.instance), self.start_with()?);
        let owner = Owner {
            instance_id: order.instance,
            credential_sha256: vec![order.enrolment.credential_sha256.clone()],
            server_keys: vec![order.enrolment.server_key.clone()],
        };
        if home.owner().as_ref() != Some(&owner) {
            home.enrol(&with.program, &owner).await?;
        }
        let env = order.env.clone();
        let health = home.ensure(&StartOptions { env, ..with }).await?;
        Ok(self.machine(made, Some((home.socket(), health.version))))
    }

    fn machine(&self, made: &InstanceRecord, agent: Option<(PathBuf, String)>) -> BackendInstance {
        let (path, agent_version) = agent.unzip();
        BackendInstance {
            id: format!("i-{}", &made.instance.to_string()[..SHORT_ID_CHARS]),
            hostname: path.is_some().then(|| "127.0.0.1".to_owned()),
            internal_ip: path.is_some().then(|| "127.0.0.1".to_owned()),
            reach: path.map(|path| AgentEndpoint::Socket { path }),
            has: None,
            agent_version,
            memo: json!({ "said": "an instance of the mock cloud" }),
        }
    }

    async fn find_instance(&self, order: &InstanceRequest) -> Result<InstanceState, BackendError> {
        let _alone = self.lock_ledger().await?;
        let Some(made) = self.ledger.machine(order.instance)? else { return Ok(InstanceState::Unknown) };
        if self.is_listing_stale(&made)? {
            return Ok(InstanceState::Unknown);
        }
        let kind = self.script_for(&made);
        let is_due =
            |kind: &OfferScript| kind.preempt_after_ms.is_some_and(|after| now_ms() >= made.made_ms + after);
        if made.preempted || self.ledger.preemption_file(made.instance).exists() || kind.is_some_and(is_due) {
            self.preempt_recorded(made).await?;
            return Ok(InstanceState::Gone { message: "the spot instance was preempted".to_owned() });
        }
        let boot_ms = kind.map_or(0, |kind| kind.boot_ms);
        if now_ms() < made.made_ms + boot_ms {
            return Ok(InstanceState::Starting(self.machine(&made, None)));
        }
        Ok(InstanceState::Running(self.ensure_agent(order, &made).await?))
    }

    async fn preempt_recorded(&self, made: InstanceRecord) -> Result<(), BackendError> {
        if !made.preempted {
            self.end(made.instance).await?;
            self.ledger.put_instance(&InstanceRecord { preempted: true, ..made })?;
        }
        Ok(())
    }

    async fn end(&self, instance: InstanceId) -> Result<(), BackendError> {
        let home = self.home(instance);
        if !home.is_idle() {
            home.end_tasks(&self.start_with()?).await?;
        }
        home.stop().await?;
        Ok(home.remove()?)
    }

    async fn delete_instance(&self, order: &InstanceRequest) -> Result<DeleteProgress, BackendError> {
        let _alone = self.lock_ledger().await?;
        let Some(mut made) = self.ledger.machine(order.instance)? else { return Ok(DeleteProgress::Gone) };
        self.check_delete()?;
        made.deletes += 1;
        if self.script_for(&made).is_some_and(|kind| made.deletes <= kind.slow_deletes) {
            self.ledger.put_instance(&made)?;
            return Ok(DeleteProgress::InProgress);
        }
        self.end(made.instance).await?;
        self.ledger.remove_instance(made.instance)?;
        Ok(DeleteProgress::Gone)
    }
}

impl Backend for MockCloud {
    fn name(&self) -> &'static str {
        NAME
    }

    fn offers(&self) -> BackendFuture<'_, Vec<Offer>> {
        Box::pin(async { Ok(self.script.offers.iter().map(OfferScript::offer).collect()) })
    }

    fn create<'a>(&'a self, order: &'a InstanceRequest) -> BackendFuture<'a, BackendInstance> {
        Box::pin(self.made(order))
    }

    fn find<'a>(
        &'a self,
        order: &'a InstanceRequest,
        _machine: &'a BackendInstance,
    ) -> BackendFuture<'a, InstanceState> {
        Box::pin(self.find_instance(order))
    }

    fn delete<'a>(
        &'a self,
        order: &'a InstanceRequest,
        _machine: Option<&'a BackendInstance>,
    ) -> BackendFuture<'a, DeleteProgress> {
        Box::pin(self.delete_instance(order))
    }

    fn volumes(&self) -> Option<&dyn VolumeBackend> {
        Some(self)
    }
}
