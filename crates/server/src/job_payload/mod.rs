//! Orders for the host of a placed job: the task for its shim, the start for its runner.
//!
//! The builders are pure (`task`, `start`, `shown`); this module passes them the contents of the database. Secrets are
//! opened for one call and are part of nothing that is stored, logged or shown.

pub mod address;
pub mod connection_info;
pub mod container_request;
pub mod peer_hosts;
mod pod_request;
mod runner_start;
mod task_spec;

use std::{collections::BTreeMap, sync::Arc};

use serde::Deserialize;
use uuid::Uuid;
use windlass_api::agent::{runner::RepoCredentials, shim::TaskSpec};
use windlass_backend::ContainerRequest;
use windlass_engine::Lease;
use windlass_model::{
    config::{
        job_spec::JobSpec,
        references::{self, awaited_addresses},
    },
    explain::Shortfall,
    id::{ManagedJobId, SubmissionId},
    managed_job::plan::ManagedJobPlan,
    plan::{
        execution_mode::ImageChoice,
        offers::{Gpu, Offer},
    },
};

use crate::{
    agents::{JobStart, QueueRequest},
    attachments::{self, AttachProgress},
    db::{
        documents::{
            FLEET_SPEC, JOB_SPEC, MANAGED_JOB_PLAN, MANAGED_JOB_SECRETS, REPO_CREDENTIALS, RUN_SPEC,
        },
        jobs::{self, Job},
        managed_jobs,
        pipeline_rows::{job_nodes as rows, jobs::JobInputs},
        repos,
        runs::{self, Run},
        secrets,
    },
    encryption::{AssociatedData, KeyError},
    inventory,
    node_keys::{self, OpenNodeKeyError},
    parsed_run_spec::ParsedRunSpec,
    pass_error::PassError,
    pipelines::PipelineContext,
    plain_processes::ProcessRights,
    queue_rank::QueueRank,
    sealed_passwords::{self, OpenPasswordError},
    secret_rights,
};

pub(crate) use self::task_spec::registry_credentials;

/// Reason why there are no orders.
#[derive(Debug, thiserror::Error)]
pub enum PayloadError {
    /// The job can never be started as it is: it ends with this message.
    #[error(transparent)]
    Unsuitable(#[from] UnstartableReason),
    /// Something that the job needs is not ready yet.
    #[error("{message}")]
    NotYet { message: String },
    /// The next pass may succeed.
    #[error(transparent)]
    Pass(#[from] PassError),
}

/// Reason why a job cannot start, as a message for its user.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnstartableReason {
    #[error(
        "cannot start the job: {} not set in this project; hint: run `windlass secret set NAME`, then submit \
         the run again",
        missing(.names)
    )]
    MissingSecrets { names: Vec<String> },
    #[error(
        "cannot start the job: runs of this user may no longer use secret `{}`; hint: a manager of the \
         project can change this with `windlass secret set NAME --for …`",
        names.join("`, `")
    )]
    WithheldSecrets { names: Vec<String> },
    #[error(
        "cannot start the job: repository `{id}` no longer exists in the project; hint: submit the run again"
    )]
    NoRepo { id: String },
    #[error(
        "cannot start the job: the code `{hash}` of its repository is no longer stored; hint: submit the run \
         again"
    )]
    NoCode { hash: String },
    #[error("cannot start the job: file archive {id} is no longer stored; hint: submit the run again")]
    NoArchive { id: Uuid },
    #[error(
        "cannot start the job: the password of its registry is no longer stored; hint: submit the run again, \
         with the password or a secret as `registry_auth.password`"
    )]
    NoPassword,
    #[error("cannot start the job: {message}")]
    NoVolume { message: String },
    #[error("cannot start the job: it {short}; hint: {hint}")]
    NoProcess { short: String, hint: String },
    #[error("cannot start the job: a queue cannot run {what}; hint: {hint}")]
    NotInQueue { what: String, hint: String },
}

fn missing(names: &[String]) -> String {
    match names {
        [one] => format!("secret `{one}` is"),
        many => format!("secrets `{}` are", many.join("`, `")),
    }
}

impl From<crate::db::DbError> for PayloadError {
    fn from(error: crate::db::DbError) -> Self {
        Self::Pass(error.into())
    }
}

impl From<OpenNodeKeyError> for PayloadError {
    fn from(error: OpenNodeKeyError) -> Self {
        match error {
            OpenNodeKeyError::Keys(error) => error.into(),
            OpenNodeKeyError::Db(error) => error.into(),
        }
    }
}

impl From<KeyError> for PayloadError {
    fn from(error: KeyError) -> Self {
        Self::Pass(error.into())
    }
}

/// Grace period of commands whose job sets no limit.
pub const STOP_MAX_SECS: i64 = 24 * 3600;

/// Task of a job for the shim of its instance, and the description of its execution mode for people.
pub async fn task_spec(
    context: &PipelineContext,
    lease: &Lease,
    loaded: &JobInputs,
) -> Result<(TaskSpec, Option<String>), PayloadError> {
    let Some(instance) = &loaded.instance else { return Err(PassError::NoInstance.into()) };
    let spec = spec_with_secrets(context, &loaded.job, &loaded.run).await?;
    // The number of users may have changed since the job was placed.
    let allowed = ProcessRights::now(&context.db, context.local_processes).await?;
    let offer = allowed.on(inventory::offer(instance)?);
    let choice = ImageChoice::from_spec(&spec);
    let runs_in =
        match choice.as_ref().map(|choice| choice.resolve_on(offer.host.runtimes.as_ref())).transpose() {
            Ok(runs_in) => runs_in,
            Err(short @ (Shortfall::NotConfined { .. } | Shortfall::ProcessesRefused)) => {
                return Err(
                    UnstartableReason::NoProcess { short: short.to_string(), hint: short.cure() }.into()
                );
            }
            Err(short @ (Shortfall::EngineUnavailable { .. } | Shortfall::ProcessesUnknown)) => {
                return Err(PayloadError::NotYet { message: format!("the job {short}") });
            }
            // The agent rejects what the instance cannot run.
            Err(_) => None,
        };
    let attach = attachments::attach(&context.db, &context.backends, lease, &loaded.job, instance);
    let mounts = match attach.await? {
        AttachProgress::Ready(mounts) => mounts,
        AttachProgress::Coming { message } => return Err(PayloadError::NotYet { message }),
        AttachProgress::Failed { message } => return Err(UnstartableReason::NoVolume { message }.into()),
    };
    let fleet = fleet_spec(loaded)?;
    let login = connection_info::HostLogin::of(instance, fleet.as_ref())?;
    let built = task_spec::build(&task_spec::Inputs {
        job: &loaded.job,
        spec: &spec,
        offer: &offer,
        runs_in,
        mounts,
        user_key: user_key(loaded)?.as_deref(),
        project: &loaded.project.name,
        project_key: loaded.project.ssh_public_key.as_deref(),
        login: login.as_ref(),
    });
    Ok((built, runs_in.map(|runs_in| runs_in.to_string())))
}

/// Everything that the runner of a job needs to start.
pub async fn runner_start(context: &PipelineContext, loaded: &JobInputs) -> Result<JobStart, PayloadError> {
    let shape = context.shapes.of(&loaded.run).map_err(PassError::from)?;
    let spec = spec_with_secrets(context, &loaded.job, &loaded.run).await?;
    let nodes = rows::nodes(&context.db, loaded).await?;
    let addresses = addresses(context, loaded, &shape, &spec).await?;
    let fleet = fleet_spec(loaded)?;
    let key = match spec.jobs_per_replica > 1 {
        true => match jobs::secrets(&context.db, loaded.job.id).await? {
            Some(sealed) => Some(node_keys::open(&context.keys, loaded.job.id, &sealed)?),
            None => None,
        },
        false => None,
    };
    let (repo_credentials, code) = repo(context, loaded, &spec).await?;
    let submit = runner_start::build(&runner_start::Inputs {
        run: &loaded.run,
        job: &loaded.job,
        spec,
        project_name: Some(&loaded.project.name),
        fleet_env: fleet
            .map(|spec| runner_start::variables(&spec["configuration"]["env"]))
            .unwrap_or_default(),
        nodes: &nodes,
        addresses: &addresses,
        key,
        repo_credentials,
        log_quota_hour: context.limits.log_bytes_hour,
    })?;
    let mut archives = Vec::new();
    for file in &submit.job_spec.file_archives {
        archives.push((file.id.clone(), archive(context, loaded, &file.id).await?));
    }
    Ok(JobStart { submit, code, archives })
}

/// The container of the job for which an instance is created, where instances are pods; `None` if the job does not run
/// in one there.
pub(crate) async fn pod_container(
    context: &PipelineContext,
    job: SubmissionId,
    offer: &Offer,
) -> Result<Option<ContainerRequest>, PayloadError> {
    let Some(job) = jobs::find(&context.db, job).await? else { return Ok(None) };
    let Some(run) = runs::find(&context.db, job.run_id).await? else { return Ok(None) };
    let spec = spec_with_secrets(context, &job, &run.run).await?;
    Ok(pod_request::build(&spec, offer))
}

/// The job as a container, where its instance is a queue.
pub async fn container_request(
    context: &PipelineContext,
    loaded: &JobInputs,
) -> Result<QueueRequest, PayloadError> {
    let Some(instance) = &loaded.instance else { return Err(PassError::NoInstance.into()) };
    let start = runner_start(context, loaded).await?;
    let spec: JobSpec = JOB_SPEC.decode(loaded.job.id, &loaded.job.job_spec)?;
    Ok(container_request::build(&container_request::Inputs {
        submission: loaded.job.id,
        user: loaded.run.user_id,
        run_name: &loaded.run.name,
        rank: QueueRank::from_stored(loaded.run.priority),
        spec: &spec,
        start: &start,
        dispatcher: instance.region.as_deref(),
        partition: instance.availability_zone.as_deref(),
        gpu_type: inventory::offer(instance)?.host.gpus.first().and_then(Gpu::type_name),
        is_spot: instance.spot,
    })?)
}

/// Returns whether every address that the commands of a job name is known. Tasks wait for all nodes anyway.
pub async fn are_addresses_known(context: &PipelineContext, loaded: &JobInputs) -> Result<bool, PassError> {
    let spec: JobSpec = JOB_SPEC.decode(loaded.job.id, &loaded.job.job_spec)?;
    let awaited = awaited_addresses(&spec);
    if awaited.is_empty() {
        return Ok(true);
    }
    let shape = context.shapes.of(&loaded.run)?;
    match addresses(context, loaded, &shape, &spec).await {
        Ok(known) => Ok(awaited.iter().all(|(group, member, _)| known.contains_key(&(*group, *member)))),
        Err(PayloadError::Pass(error)) => Err(error),
        Err(PayloadError::Unsuitable(_) | PayloadError::NotYet { .. }) => Ok(true),
    }
}

async fn spec_with_secrets(context: &PipelineContext, job: &Job, run: &Run) -> Result<JobSpec, PayloadError> {
    let mut spec: JobSpec = JOB_SPEC.decode(job.id, &job.job_spec)?;
    let names = references::secret_names(&spec);
    let (project, user) = (job.project_id, run.user_id);
    let withheld = secret_rights::withheld(&context.db, project, user, &names).await?;
    if !withheld.is_empty() {
        return Err(UnstartableReason::WithheldSecrets { names: withheld }.into());
    }
    let mut values = BTreeMap::new();
    for name in names {
        if let Some(secret) = secrets::find(&context.db, job.project_id, &name).await? {
            let belongs = AssociatedData {
                table: "secrets",
                owner: secret.project_id.0,
                name: &name,
                version: secret.version,
            };
            let plain = context.keys.open_sealed(&belongs, &secret.sealed)?;
            values.insert(name, String::from_utf8_lossy(&plain).into_owned());
        }
    }
    if let Some(managed) = run.managed_job_id {
        spec.env.extend(managed_secrets(context, managed, &run.name).await?);
    }
    let sealed =
        spec.registry_auth.as_ref().and_then(|auth| sealed_passwords::parse_reference(&auth.password));
    if let (Some(id), Some(auth)) = (sealed, &mut spec.registry_auth) {
        let opened = sealed_passwords::open_password(&context.db, &context.keys, job.project_id, id).await;
        auth.password = opened
            .map_err(|error| match error {
                OpenPasswordError::Db(error) => PayloadError::from(error),
                OpenPasswordError::Keys(error) => PayloadError::from(error),
            })?
            .ok_or(UnstartableReason::NoPassword)?;
    }
    match references::insert_secrets(&mut spec, |name| values.get(name).cloned()) {
        Ok(()) => Ok(spec),
        Err(references::Error::MissingSecrets { names }) => {
            Err(UnstartableReason::MissingSecrets { names }.into())
        }
        // Only a missing secret can fail here.
        Err(references::Error::Reference { .. } | references::Error::Unset { .. }) => Ok(spec),
    }
}

/// Secrets of the managed job's task of which this run is an attempt.
async fn managed_secrets(
    context: &PipelineContext,
    job: ManagedJobId,
    run: &str,
) -> Result<BTreeMap<String, String>, PayloadError> {
    let Some((plan, sealed)) = managed_jobs::secrets(&context.db, job).await? else {
        return Ok(BTreeMap::new());
    };
    let plan: ManagedJobPlan = MANAGED_JOB_PLAN.decode(job, &plan)?;
    let belongs = AssociatedData::row("managed_jobs", "secrets_sealed", job.0);
    let plain = context.keys.open_sealed(&belongs, &sealed)?;
    let mut values: Vec<BTreeMap<String, String>> = MANAGED_JOB_SECRETS.decode_bytes(job, &plain)?;
    let task = plan.task_index_of_run(run).filter(|task| *task < values.len());
    Ok(task.map(|task| values.swap_remove(task)).unwrap_or_default())
}

/// SSH key of the run's user.
fn user_key(loaded: &JobInputs) -> Result<Option<String>, PassError> {
    #[derive(Deserialize)]
    struct Spec {
        ssh_key_pub: Option<String>,
    }
    let spec: Spec = RUN_SPEC.decode(loaded.run.id, &loaded.run.spec)?;
    Ok(spec.ssh_key_pub)
}

/// Addresses by group and member: nodes of the replica, or replicas of the service.
async fn addresses(
    context: &PipelineContext,
    loaded: &JobInputs,
    shape: &ParsedRunSpec,
    spec: &JobSpec,
) -> Result<BTreeMap<(u32, u32), String>, PayloadError> {
    if awaited_addresses(spec).is_empty() {
        return Ok(BTreeMap::new());
    }
    let is_service = spec.service_port.is_some();
    let nodes = if is_service {
        rows::replicas(&context.db, &loaded.run).await?
    } else {
        rows::nodes(&context.db, loaded).await?
    };
    let groups = is_service.then(|| shape.replica_group_names());
    Ok(runner_start::addresses_by_group(&nodes, &loaded.job, groups.as_deref())?)
}

/// Stored specification of the fleet of a job's instance; without private keys.
pub fn fleet_spec(loaded: &JobInputs) -> Result<Option<serde_json::Value>, PassError> {
    Ok(FLEET_SPEC.decode_opt(format_args!("of job {}", loaded.job.id), loaded.fleet_spec.as_deref())?)
}

/// Credentials for cloning the repository, and its uploaded changes.
async fn repo(
    context: &PipelineContext,
    loaded: &JobInputs,
    spec: &JobSpec,
) -> Result<(Option<RepoCredentials>, Option<Arc<[u8]>>), PayloadError> {
    let kind = spec.repo_data.as_ref().and_then(|data| data["repo_type"].as_str()).unwrap_or("virtual");
    let hash = spec.repo_code_hash.as_deref();
    if kind == "virtual" && hash.is_none() {
        return Ok((None, None));
    }
    let id = loaded.run.repo_id.clone().unwrap_or_default();
    let Some(repo) = repos::find(&context.db, loaded.job.project_id, &id).await? else {
        return Err(UnstartableReason::NoRepo { id }.into());
    };
    let code = match hash {
        None => None,
        Some(hash) => match repos::code(&context.db, repo.id, hash).await? {
            Some(blob) => Some(blob.into()),
            None => return Err(UnstartableReason::NoCode { hash: hash.to_owned() }.into()),
        },
    };
    let user = loaded.run.user_id;
    let stored = match repos::creds(&context.db, repo.id, user).await? {
        Some(sealed) => {
            let user = user.to_string();
            let belongs = AssociatedData { table: "repo_creds", owner: repo.id, name: &user, version: 1 };
            let plain = context.keys.open_sealed(&belongs, &sealed)?;
            Some(REPO_CREDENTIALS.decode_bytes(repo.id, &plain)?)
        }
        None => None,
    };
    let credentials = match stored {
        _ if kind != "remote" => None,
        Some(stored) => Some(stored),
        // A public repository is cloned by its own address.
        None => runner_start::public_repo(&loaded.run)?,
    };
    Ok((credentials, code))
}

async fn archive(context: &PipelineContext, loaded: &JobInputs, id: &str) -> Result<Arc<[u8]>, PayloadError> {
    let id: Uuid = id.parse().unwrap_or_default();
    match repos::archive(&context.db, id).await? {
        Some((owner, _, blob)) if owner == loaded.run.user_id => Ok(blob.into()),
        Some(_) | None => Err(UnstartableReason::NoArchive { id }.into()),
    }
}
