//! Calls to backends that create, find and delete machines.

use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout};
use windlass_backend::{
    Backend, BackendError, BackendInstance, ContainerRequest, DeleteProgress, InstanceRequest,
    InstanceSource, InstanceState, remote::RemoteState,
};
use windlass_engine::Lease;
use windlass_model::{
    backend_kind::BackendKind,
    decide::instances::InstanceObservation,
    error_chain::format_chain,
    id::InstanceId,
    plan::{blocks, offers::Offer},
};
use windlass_tunnel::{HostKey, HostKeyEntry, LoginKey};

use super::{InstanceReport, InstancesPipeline, Row};
use crate::{
    agents::{
        enrolment,
        ssh_target::{self, SshTargetError},
    },
    db::pipeline_rows::instances as rows,
    instance_documents::OfferAttempts,
    job_payload::{self, PayloadError},
    pass_error::PassError,
};

/// Maximum time for one call to a backend. The row's lease is renewed meanwhile.
const CALL_TIMEOUT: Duration = Duration::from_secs(540);
/// Interval at which the progress of an installation is stored.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of refusal reasons that are listed; the rest is counted.
const REASONS_MAX: usize = 5;

impl InstancesPipeline {
    /// Builds the order for an instance: for its SSH host, or for this offer.
    async fn order(&self, row: &Row, offer: Option<&Offer>) -> Result<InstanceRequest, BackendError> {
        let (db, keys, id) = (&self.0.db, &*self.0.keys, row.instance.id);
        let failed = |what, message: String| BackendError::Unavailable { what, message };
        let enrolment = enrolment::enrolment(db, keys, id)
            .await
            .map_err(|error| failed("failed to create the agent's credential", format_chain(&error)))?;
        let login = if row.is_ssh() { None } else { Some(self.login_key(id).await?) };
        let want = if row.is_ssh() {
            let site = ssh_target::load_target(db, keys, id)
                .await
                .map_err(|error| failed("failed to read the host's SSH settings", format_chain(&error)))?;
            InstanceSource::Host(Box::new(site))
        } else {
            let offer = match offer.or_else(|| row.documents.offer()) {
                Some(offer) => offer.clone(),
                None => crate::inventory::offer(&row.instance)
                    .map_err(|error| failed("failed to read its offer", format_chain(&error)))?,
            };
            InstanceSource::Offer(Box::new(offer))
        };
        let (alternatives, container) = match offer {
            Some(offer) if BackendKind::of(&offer.backend) == BackendKind::Pods => {
                (alternatives(row, offer), self.container(row, offer).await?)
            }
            Some(_) | None => (Vec::new(), None),
        };
        Ok(InstanceRequest {
            instance: id,
            alternatives,
            container,
            name: row.instance.name.clone(),
            want,
            enrolment,
            tags: row.documents.profile.tags.clone(),
            env: row.fleet.as_ref().map(|fleet| fleet.shape.env()).unwrap_or_default(),
            login,
        })
    }

    /// Container of the job for which the instance is created.
    async fn container(&self, row: &Row, offer: &Offer) -> Result<Option<ContainerRequest>, BackendError> {
        let Some(job) = row.instance.made_for else { return Ok(None) };
        let what = "prepare the container of the job";
        job_payload::pod_container(&self.0, job, offer).await.map_err(|error| match error {
            PayloadError::Unsuitable(error) => BackendError::Refused { what, message: error.to_string() },
            PayloadError::NotYet { message } => BackendError::Unavailable { what, message },
            PayloadError::Pass(error) => BackendError::Unavailable { what, message: format_chain(&error) },
        })
    }

    /// Key with which the server logs in to the machine, if its backend rents machines.
    async fn login_key(&self, instance: InstanceId) -> Result<LoginKey, BackendError> {
        let failed = |message| BackendError::Unavailable { what: "derive the key of the machine", message };
        let text = enrolment::login_key(&self.0.db, &self.0.keys, instance).await;
        let text = text.map_err(|error| failed(format_chain(&error)))?;
        LoginKey::parse(&text).map_err(|error| failed(format_chain(&error)))
    }

    /// Requests the offers in order until one is granted.
    ///
    /// A machine whose creation was not stored is found again by the instance's id, but only by the backend that
    /// created it, and in its location. So the row records both before any other than the first is used.
    pub(super) async fn create(&self, lease: &Lease, row: &Row) -> Result<InstanceReport, PassError> {
        let Some(mut tries) = row.documents.tries.clone().filter(|tries| !tries.offers.is_empty()) else {
            let message = "no backend has a matching offer".to_owned();
            return Ok(InstanceReport::from_observation(InstanceObservation::NoOffers { message }));
        };
        let mut refusals = Vec::new();
        for at in tries.at..tries.offers.len() {
            let offer = tries.offers[at].clone();
            let place = offer_place(&offer);
            let Some(backend) = self.0.backends.named(&offer.backend) else {
                refusals.push(format!("{place}: the server has no backend `{}`", offer.backend));
                continue;
            };
            if location(&tries.offers[tries.at]) != location(&offer) {
                let requested = OfferAttempts { at, ..tries.clone() };
                if !rows::set_offer_attempts(&self.0.db, lease.key(), &requested, &offer.backend)
                    .await?
                    .is_done()
                {
                    return Ok(InstanceReport::from_observation(InstanceObservation::NotRequested));
                }
            }
            tries.at = at;
            let made = match self.order(row, Some(&offer)).await {
                Ok(order) => self.made(lease, &**backend, &order).await,
                Err(error) => Err(error),
            };
            match made {
                Ok(machine) => {
                    // The other offers are no longer needed.
                    let tries = OfferAttempts { at: 0, offers: vec![offer] };
                    let findings = super::InstanceFindings {
                        machine: Some(machine),
                        granted: Some(tries),
                        ..super::InstanceFindings::default()
                    };
                    return Ok(InstanceReport { seen: InstanceObservation::Created, findings });
                }
                Err(error @ BackendError::Unavailable { .. }) => {
                    let seen = InstanceObservation::DeployFailed {
                        fatal: false,
                        message: format!("{place}: {error}"),
                    };
                    return Ok(InstanceReport {
                        seen,
                        findings: super::InstanceFindings {
                            tries: Some(tries),
                            ..super::InstanceFindings::default()
                        },
                    });
                }
                Err(
                    error @ (BackendError::NoCapacity { .. }
                    | BackendError::Refused { .. }
                    | BackendError::HostKeyChanged { .. }),
                ) => refusals.push(format!("{place}: {error}")),
            }
        }
        Ok(InstanceReport::from_observation(InstanceObservation::NoOffers {
            message: summarize_refusals(&refusals),
        }))
    }

    /// Installs the agent on an SSH host.
    pub(super) async fn deploy(&self, lease: &Lease, row: &Row) -> Result<InstanceReport, PassError> {
        let message = "the server has no backend for SSH hosts".to_owned();
        let Some(backend) = row.backend(&self.0.backends) else {
            return Ok(InstanceReport::from_observation(InstanceObservation::DeployFailed {
                fatal: false,
                message,
            }));
        };
        let made = match self.order(row, None).await {
            Ok(order) => self.made(lease, &**backend, &order).await,
            Err(error) => Err(error),
        };
        Ok(match made {
            Ok(machine) => return self.finish_deploy(row, machine).await,
            Err(error @ BackendError::HostKeyChanged { .. }) => {
                InstanceReport::from_observation(InstanceObservation::Untrusted {
                    message: error.to_string(),
                })
            }
            Err(error @ BackendError::Refused { .. }) => {
                InstanceReport::from_observation(InstanceObservation::DeployFailed {
                    fatal: true,
                    message: error.to_string(),
                })
            }
            Err(error @ (BackendError::NoCapacity { .. } | BackendError::Unavailable { .. })) => {
                InstanceReport::from_observation(InstanceObservation::DeployFailed {
                    fatal: false,
                    message: error.to_string(),
                })
            }
        })
    }

    async fn finish_deploy(&self, row: &Row, machine: BackendInstance) -> Result<InstanceReport, PassError> {
        if let Err(error) = self.pin(row, &machine).await {
            return pin_failure(error);
        }
        Ok(match total_blocks(row, &machine) {
            Ok(total_blocks) => InstanceReport {
                seen: InstanceObservation::Deployed { healthy: false },
                findings: super::InstanceFindings {
                    machine: Some(machine),
                    total_blocks,
                    ..super::InstanceFindings::default()
                },
            },
            Err(uneven) => InstanceReport::from_observation(InstanceObservation::DeployFailed {
                fatal: true,
                message: uneven.to_string(),
            }),
        })
    }

    /// Stores the keys that the host and its jump hosts presented: from now on they must present the same keys.
    async fn pin(&self, row: &Row, machine: &BackendInstance) -> Result<(), SshTargetError> {
        let keys = RemoteState::of(machine).host_keys.into_iter();
        let seen: Vec<HostKeyEntry> = keys
            .filter_map(|(host, line)| HostKey::parse(&line).ok().map(|key| HostKeyEntry { host, key }))
            .collect();
        ssh_target::pin(&self.0.db, row.instance.id, &seen).await
    }

    /// Creates the machine, and stores the progress meanwhile.
    async fn made(
        &self,
        lease: &Lease,
        backend: &dyn Backend,
        order: &InstanceRequest,
    ) -> Result<BackendInstance, BackendError> {
        let making = timeout(CALL_TIMEOUT, backend.create(order));
        tokio::pin!(making);
        let mut reported = None;
        let mut poll_at = Instant::now() + PROGRESS_INTERVAL;
        loop {
            tokio::select! {
                made = &mut making => return made.unwrap_or_else(|_| Err(BackendError::Unavailable {
                    what: "failed to create the instance",
                    message: format!("no answer within {} s", CALL_TIMEOUT.as_secs()),
                })),
                () = sleep_until(poll_at) => {
                    poll_at = Instant::now() + PROGRESS_INTERVAL;
                    let message = backend.progress(order.instance);
                    if message.is_some() && message != reported {
                        // Only for display: the pass does not depend on it.
                        let _ = rows::set_progress(&self.0.db, lease.key(), message.as_deref()).await;
                        reported = message;
                    }
                }
            }
        }
    }

    /// Queries the backend for a machine whose agent does not answer.
    pub(super) async fn find(&self, row: &Row) -> Option<Result<InstanceState, BackendError>> {
        let (backend, machine) = (row.backend(&self.0.backends)?, row.documents.machine.as_ref()?);
        let order = match self.order(row, None).await {
            Ok(order) => order,
            Err(error) => return Some(Err(error)),
        };
        let found = timeout(CALL_TIMEOUT, backend.find(&order, machine)).await;
        let message = format!("no answer within {} s", CALL_TIMEOUT.as_secs());
        Some(found.unwrap_or(Err(BackendError::Unavailable { what: "failed to find the instance", message })))
    }

    pub(super) async fn delete_machine(&self, row: &Row) -> InstanceObservation {
        let Some(backend) = row.backend(&self.0.backends) else {
            return match (&row.documents.machine, row.instance.started_at) {
                (None, None) => InstanceObservation::Gone { message: "it was never created".to_owned() },
                _ => {
                    let name = row.instance.backend.as_deref().unwrap_or_default();
                    InstanceObservation::NotDeleted { message: format!("the server has no backend `{name}`") }
                }
            };
        };
        let deleted = match self.order(row, None).await {
            Ok(order) => timeout(CALL_TIMEOUT, backend.delete(&order, row.documents.machine.as_ref())).await,
            Err(error) => Ok(Err(error)),
        };
        match deleted {
            Ok(Ok(DeleteProgress::Gone)) => InstanceObservation::Gone { message: "deleted".to_owned() },
            Ok(Ok(DeleteProgress::InProgress)) => {
                InstanceObservation::NotDeleted { message: "the backend is still deleting it".to_owned() }
            }
            Ok(Err(error)) => InstanceObservation::NotDeleted { message: error.to_string() },
            Err(_) => InstanceObservation::NotDeleted {
                message: format!("no answer within {} s", CALL_TIMEOUT.as_secs()),
            },
        }
    }
}

/// Backend, region and zones of an offer.
fn location(offer: &Offer) -> (&str, &str, &[String]) {
    (&offer.backend, &offer.region, &offer.zones)
}

/// Names an offer in messages, with its zone if there is one.
fn offer_place(offer: &Offer) -> String {
    let region = match offer.zones.as_slice() {
        [zone] => zone,
        _ => &offer.region,
    };
    format!("{} {region} {}", offer.backend, offer.instance_type)
}

/// Returns the other offers of the same backend that fit the instance.
fn alternatives(row: &Row, offer: &Offer) -> Vec<Offer> {
    let tries = row.documents.tries.iter().flat_map(|tries| &tries.offers);
    tries.filter(|other| other.backend == offer.backend && *other != offer).cloned().collect()
}

/// Converts a failure to pin the keys of a host. Only errors about the keys themselves are properties of the host: a
/// database error ends the pass, and the next one installs the agent again.
fn pin_failure(error: SshTargetError) -> Result<InstanceReport, PassError> {
    let message = format_chain(&error);
    Ok(match error {
        SshTargetError::Db(error) => return Err(error.into()),
        SshTargetError::Keys(error) => return Err(error.into()),
        SshTargetError::Contended { .. } | SshTargetError::LoginKey(_) => {
            InstanceReport::from_observation(InstanceObservation::DeployFailed { fatal: false, message })
        }
        SshTargetError::NoInstance { .. }
        | SshTargetError::NotSsh { .. }
        | SshTargetError::Missing { .. }
        | SshTargetError::Login(_)
        | SshTargetError::Pinned { .. }
        | SshTargetError::Changed { .. }
        | SshTargetError::TooMany { .. } => {
            InstanceReport::from_observation(InstanceObservation::Untrusted { message })
        }
    })
}

/// Number of blocks of an SSH host; `None` means the stored number.
fn total_blocks(row: &Row, machine: &BackendInstance) -> Result<Option<i64>, blocks::UnevenBlocks> {
    let Some(has) = &machine.has else { return Ok(None) };
    let wanted = match row.instance.total_blocks.and_then(|count| u32::try_from(count).ok()) {
        Some(count) => blocks::Blocks::Count(count),
        None => blocks::Blocks::Auto,
    };
    let gpus = u32::try_from(has.gpus.len()).unwrap_or(u32::MAX);
    blocks::split_count(wanted, has.cpus, gpus).map(|count| Some(count.into()))
}

fn summarize_refusals(refusals: &[String]) -> String {
    let mut message = format!("{} offers were tried: ", refusals.len());
    message += &refusals[..refusals.len().min(REASONS_MAX)].join("; ");
    if refusals.len() > REASONS_MAX {
        message += &format!("; and {} more", refusals.len() - REASONS_MAX);
    }
    message
}
