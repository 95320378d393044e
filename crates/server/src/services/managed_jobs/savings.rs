//! Cost of a managed job compared with on-demand nodes, and its progress towards its deadline.

use windlass_api::managed_jobs::{DeadlineLine, MarketDecision, Savings};
use windlass_model::{
    deadline_policy::MarketRule,
    managed_job::plan::ManagedJobPlan,
    time::{Span, Timestamp},
};

use crate::{
    app::App,
    auth::ProjectScope,
    db::{
        Page,
        costs::{self, CostInterval},
        documents::MANAGED_JOB_PLAN,
        events::{self, EventQuery},
        explanations::{self, JobTimes},
        managed_jobs as rows,
    },
    error::{Error, Result},
    services::costs::{OnDemandPrices, cost_at},
};

const EVENTS_MAX: i64 = 1000;
const PROGRESS_MAX: usize = 500;

pub(crate) async fn savings(app: &App, scope: &ProjectScope, number: i64) -> Result<Savings> {
    let found = rows::find(app.db(), scope.project.id, number).await?;
    let found = found.ok_or_else(|| Error::absent("Managed job"))?;
    let id = found.job.id;
    let plan: ManagedJobPlan = MANAGED_JOB_PLAN.decode(id, &found.job.plan)?;
    let prices = OnDemandPrices::load(app).await;
    let intervals = costs::intervals_of_job(app.db(), id).await?;
    let spent: f64 = intervals.iter().map(|one| cost_at(one, one.price)).sum();
    let mut on_demand = Some(0.0);
    for one in &intervals {
        let cost = prices.of(one)?.map(|price| cost_at(one, price));
        on_demand = on_demand.zip(cost).map(|(sum, cost)| sum + cost);
    }
    let times = explanations::times_of_managed_job(app.db(), id).await?;
    let now = app.db().now().await?;
    // The only rule that moves a task which runs.
    let rules = [MarketRule::MoveToSpot.as_str().to_owned()];
    let query = EventQuery {
        visible_to: None,
        targets: Some(&[id.0]),
        within: None,
        types: None,
        actors: None,
        reasons: Some(&rules),
        kinds: None,
        entities: None,
        since: None,
        until: None,
        text: None,
        page: Page { limit: EVENTS_MAX, ascending: true, ..Page::default() },
    };
    let recorded = events::list(app.db(), &query).await?;
    let explained = recorded.into_iter().map(|event| MarketDecision {
        at: event.recorded_at,
        market: None,
        message: event.message,
    });
    let mut decisions: Vec<MarketDecision> = placements(&times).into_iter().chain(explained).collect();
    decisions.sort_by_key(|decision| decision.at);
    Ok(Savings {
        spent,
        on_demand,
        saved: on_demand.map(|on_demand| on_demand - spent),
        changeovers: changeovers(&intervals),
        deadline: deadline_line(&plan, &times),
        progress: progress(&times, now),
        decisions,
    })
}

/// Number of attempts after the first that got nodes.
fn changeovers(intervals: &[CostInterval]) -> u32 {
    let mut names: Vec<&str> = intervals.iter().map(|one| one.name.as_str()).collect();
    names.dedup();
    u32::try_from(names.len().saturating_sub(1)).unwrap_or(u32::MAX)
}

fn first_nodes(times: &[JobTimes]) -> impl Iterator<Item = &JobTimes> {
    times.iter().filter(|one| (one.replica_num, one.job_num) == (0, 0))
}

/// Nodes that the attempts got.
fn placements(times: &[JobTimes]) -> Vec<MarketDecision> {
    let placed = first_nodes(times).filter_map(|one| {
        let instance = one.instance.as_ref()?;
        Some(MarketDecision {
            at: one.provisioned_at?,
            market: one.spot.map(|spot| if spot { "spot" } else { "on-demand" }.to_owned()),
            message: format!("{} got {instance}", one.run_name),
        })
    });
    placed.collect()
}

/// Line of the first task with a deadline, from the first submission.
fn deadline_line(plan: &ManagedJobPlan, times: &[JobTimes]) -> Option<DeadlineLine> {
    let terms = plan.tasks.iter().find_map(|task| task.deadline)?;
    let from = times.iter().map(|one| one.submitted_at).min()?;
    Some(DeadlineLine { from, to: from + Span::secs(terms.within), work_seconds: terms.work })
}

/// Seconds during which the first nodes ran, at each of their starts and ends.
fn progress(times: &[JobTimes], now: Timestamp) -> Vec<(Timestamp, f64)> {
    let mut done = 0.0;
    let mut points = Vec::new();
    for one in first_nodes(times) {
        let Some(started) = one.running_at else { continue };
        let ended = one.terminating_at.or(one.finished_at).unwrap_or(now).max(started);
        points.push((started, done));
        #[expect(clippy::cast_precision_loss, reason = "microseconds of a task")]
        let seconds = ended.since(started).0 as f64 / 1e6;
        done += seconds;
        points.push((ended, done));
    }
    points.sort_by_key(|(at, _)| *at);
    points.truncate(PROGRESS_MAX);
    points
}

#[cfg(test)]
mod tests {
    use windlass_model::id::{RunId, SubmissionId};

    use super::*;

    fn times(run: &str, started: i64, ended: Option<i64>) -> JobTimes {
        JobTimes {
            id: SubmissionId(uuid::Uuid::nil()),
            run_id: RunId(uuid::Uuid::nil()),
            replica_num: 0,
            job_num: 0,
            submission_num: 0,
            submitted_at: Timestamp::from_secs(started - 10),
            provisioned_at: Some(Timestamp::from_secs(started - 5)),
            pulling_at: None,
            running_at: Some(Timestamp::from_secs(started)),
            terminating_at: None,
            finished_at: ended.map(Timestamp::from_secs),
            termination_reason: None,
            termination_message: None,
            instance: Some("spot-1".into()),
            spot: Some(true),
            run_name: run.into(),
        }
    }

    #[test]
    fn progress_is_the_time_that_the_attempts_ran() {
        let all = [times("a-1", 100, Some(150)), times("a-2", 200, None)];
        let points = progress(&all, Timestamp::from_secs(230));
        let shown: Vec<(i64, i64)> =
            points.iter().map(|(at, done)| (at.0 / 1_000_000, done.round() as i64)).collect();
        assert_eq!(shown, [(100, 0), (150, 50), (200, 50), (230, 80)]);
        let placed = placements(&all);
        assert_eq!((placed.len(), placed[1].message.as_str()), (2, "a-2 got spot-1"));
    }
}
