//! Rows of the run of one attempt.

use windlass_engine::Lease;
use windlass_model::{
    deadline_policy::Market,
    decide::managed_jobs::SubmitAttempt,
    event::{self, Actor},
    money::Price,
    plan::offers::{Offer, smallest_fit},
    skypilot::JobIdentity,
};

use super::Row;
use crate::{
    attempt_specs::{Attempt, AttemptSpecBuilder, AttemptSpecError, PlacementPreferences},
    db::{Unit, pipeline_rows::managed_jobs::AttemptRun},
    error::Error,
    pass_error::PassError,
    pipelines::PipelineContext,
    services::{
        offers::{self, OfferSupply},
        runs::submit::{self, PreemptionHistory},
    },
};

/// Name of the run of an attempt.
pub(super) fn run_name(row: &Row, index: usize, attempt: u32) -> String {
    let task = u32::try_from(index).unwrap_or_default();
    row.plan.run_name(&row.loaded.job.id.to_string(), task, attempt)
}

/// Builds the unit that creates the run, with the place in the queue of the attempt before it. The inner error is the
/// reason why it cannot be created, which ends the attempt and not the pass.
pub(super) fn run_unit(
    context: &PipelineContext,
    lease: &Lease,
    row: &Row,
    (index, before): (usize, Option<&AttemptRun>),
    requested: &SubmitAttempt,
) -> Result<Result<Unit, String>, PassError> {
    let job = &row.loaded.job;
    let builder = spec_builder(row);
    let attempt = Attempt {
        task: u32::try_from(index).unwrap_or_default(),
        number: requested.attempt,
        candidate: requested.candidate,
        market: requested.market,
    };
    let spec = match builder.spec(&attempt) {
        Ok(spec) => spec,
        Err(AttemptSpecError::Run(Error::Db(error))) => return Err(error.into()),
        Err(error) => return Ok(Err(error.to_string())),
    };
    let placing = PlacementPreferences { avoid: requested.avoid.clone(), prefer: requested.prefer.clone() };
    let placing = (!placing.is_empty()).then(|| serde_json::to_string(&placing)).transpose();
    let epoch = u64::try_from(lease.epoch).unwrap_or_default();
    let by = submit::RunRequest {
        project: job.project_id,
        project_name: &row.loaded.project,
        user: job.user_id,
        actor: Actor::Pipeline { name: event::Pipeline::ManagedJob, epoch },
        idempotency_key: None,
        idempotency_hash: None,
        managed_job: Some(job.id),
        places: placing.map_err(PassError::document)?,
        published: None,
        jobs_max: context.limits.run_jobs,
        history: before.map_or_else(PreemptionHistory::default, |before| {
            PreemptionHistory::after_attempt(before.jobs.iter().map(|(job, _)| job))
        }),
    };
    match submit::unit(&context.db, &context.keys, by, &spec, None) {
        Ok((_, run_unit)) => Ok(Ok(run_unit)),
        Err(Error::Db(error)) => Err(error.into()),
        Err(error) => Ok(Err(error.to_string())),
    }
}

/// Returns whether, according to the offers, all nodes of a task are available on the spot market now.
pub(super) fn has_spot_capacity(row: &Row, index: usize, offers: &[Offer]) -> bool {
    let task = u32::try_from(index).unwrap_or_default();
    let attempt = Attempt { task, number: 1, candidate: 0, market: Some(Market::Spot) };
    let Ok(spec) = spec_builder(row).spec(&attempt) else { return false };
    let Ok(jobs) = spec.jobs() else { return false };
    let there = offers.iter().filter(|offer| offer.host.spot && offer.availability.is_worth_trying());
    jobs.first().is_some_and(|job| {
        let needs = spec.shape.needs_of(job);
        there.clone().any(|offer| smallest_fit(offer, &needs).is_ok())
    })
}

fn spec_builder(row: &Row) -> AttemptSpecBuilder<'_> {
    let job = &row.loaded.job;
    AttemptSpecBuilder {
        id: job.id.0,
        plan: &row.plan,
        files: &row.files,
        identity: JobIdentity {
            job_id: job.number.to_string(),
            submitted_at: job.submitted_at,
            user: row.loaded.user.clone(),
            rank: u32::try_from(job.rank).unwrap_or_default(),
            copies: u32::try_from(job.copies).unwrap_or(1),
        },
        priority: job.priority,
        ssh_key: row.loaded.ssh_key.as_deref(),
        site: row.site.clone(),
        images: &row.images,
    }
}

/// Minimum hourly price of a node for each candidate of a task; `None` where none is available now.
pub(super) fn candidate_prices(row: &Row, index: usize, supply: &OfferSupply) -> Vec<Option<Price>> {
    let task = u32::try_from(index).unwrap_or_default();
    let count = row.plan.tasks.get(index).map_or(0, |task| task.candidates.len());
    let builder = spec_builder(row);
    let price = |candidate: u32| {
        let spec = builder.spec(&Attempt { task, number: 1, candidate, market: None }).ok()?;
        let jobs = spec.jobs().ok()?;
        offers::cheapest(supply, &spec.shape, jobs.first()?)
    };
    (0..).take(count).map(price).collect()
}
