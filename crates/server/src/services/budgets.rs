//! Budgets of projects and their members, and the events when one is nearly used up or used up.

use std::time::Duration;

use windlass_api::budgets as wire;
use windlass_model::{
    config::job_spec::JobSpec,
    event::Entity,
    id::{ProjectId, UserId},
    plan::budget::{Budget, BudgetPeriod, BudgetState, BudgetUnit, least_gpu_time},
    time::Timestamp,
};

use super::quotas::{check_right, write};
use crate::{
    app::App,
    auth::ProjectScope,
    db::{
        Unit, WriteOutcome,
        budgets::{self, NamedBudget},
    },
    error::{Error, Result},
    events::{EventSubject, note},
};

/// Interval at which the state of all budgets is compared with the events that were recorded.
const WATCH_INTERVAL: Duration = Duration::from_secs(60);
const AMOUNT_MAX: f64 = 1e15;

pub async fn list(app: &App, scope: &ProjectScope) -> Result<wire::Budgets> {
    let now = app.db().now().await?;
    let found = budgets::list(app.db(), &[scope.project.id], now).await?;
    Ok(wire::Budgets { budgets: found.into_iter().map(to_wire).collect() })
}

pub async fn set(app: &App, scope: &ProjectScope, sent: &wire::SetRequest) -> Result<wire::Budgets> {
    let (unit, period) = (parse_unit(&sent.unit)?, parse_period(&sent.period)?);
    let (warn, cap) = (amount("warn", sent.warn, unit)?, amount("cap", sent.cap, unit)?);
    match (warn, cap) {
        (None, None) => return Err(Error::field("cap", "is required, or `warn`")),
        (Some(warn), Some(cap)) if warn > cap => {
            return Err(Error::field("warn", "must not be more than `cap`"));
        }
        (..) => {}
    }
    let member = check_right(app, scope, sent.username.as_deref(), "budget").await?;
    let (project, ends_at) = (scope.project.id, Timestamp(0));
    let budget = Budget { project, member, unit, period, warn, cap, spent: 0, ends_at };
    let change = budgets::set(app.db().new_id()?, &budget);
    let parts = [("warning at", warn), ("cap", cap)];
    let parts = parts.iter().filter_map(|(name, amount)| Some((*name, (*amount)?)));
    let parts: Vec<String> = parts.map(|(name, amount)| format!("{name} {}", unit.amount(amount))).collect();
    let message =
        format!("Budget{} for each {period} set to {}", of(sent.username.as_deref()), parts.join(", "));
    write(app, scope, change, "budget_set", message).await?;
    list(app, scope).await
}

pub async fn delete(app: &App, scope: &ProjectScope, sent: &wire::DeleteRequest) -> Result<wire::Budgets> {
    let (unit, period) = (parse_unit(&sent.unit)?, parse_period(&sent.period)?);
    let member = check_right(app, scope, sent.username.as_deref(), "budget").await?;
    let change = budgets::delete(scope.project.id, member, unit, period);
    let message = format!("Budget{} of {unit} for each {period} deleted", of(sent.username.as_deref()));
    match write(app, scope, change, "budget_deleted", message).await? {
        WriteOutcome::Done { .. } => list(app, scope).await,
        WriteOutcome::Stale { .. } => Err(Error::absent("Budget")),
    }
}

fn of(member: Option<&str>) -> String {
    member.map(|name| format!(" of {name}")).unwrap_or_default()
}

/// Rejects jobs whose time limits alone exceed a budget of GPU hours: they could not end within it.
pub(crate) async fn check_jobs(app: &App, project: ProjectId, user: UserId, jobs: &[JobSpec]) -> Result<()> {
    let Some(wanted) = least_gpu_time(jobs) else { return Ok(()) };
    let now = app.db().now().await?;
    for NamedBudget { budget, member_name, .. } in budgets::list(app.db(), &[project], now).await? {
        let Some(cap) = budget.cap.filter(|_| budget.unit == BudgetUnit::GpuHours) else { continue };
        if budget.applies_to(project, user) && wanted > cap {
            let whose = member_name.map_or("the project".to_owned(), |name| format!("member `{name}`"));
            let (period, unit) = (budget.period, budget.unit);
            return Err(Error::refused(format!(
                "the run may use {} until its `max_duration`, but the budget of {whose} for this {period} is {}, of which {} \
                 are spent, until {}; hint: lower `max_duration` or the number of GPUs, or have an admin raise the budget with `windlass budget set`",
                unit.amount(wanted),
                unit.amount(cap),
                unit.amount(budget.spent),
                budget.ends_at
            )));
        }
    }
    Ok(())
}

fn amount(field: &'static str, sent: Option<f64>, unit: BudgetUnit) -> Result<Option<u64>> {
    let Some(sent) = sent else { return Ok(None) };
    let amount = sent * unit.scale();
    if !(0.0..=AMOUNT_MAX).contains(&amount) {
        return Err(Error::field(field, "must be a number from 0 to 1e8"));
    }
    Ok(Some(amount.round() as u64))
}

fn parse_unit(text: &str) -> Result<BudgetUnit> {
    text.parse().map_err(|_| Error::field("unit", "must be `cost` or `gpu-hours`"))
}

fn parse_period(text: &str) -> Result<BudgetPeriod> {
    text.parse().map_err(|_| Error::field("period", "must be `day`, `week` or `month`"))
}

fn to_wire(found: NamedBudget) -> wire::Budget {
    let NamedBudget { budget, member_name, .. } = found;
    let amount = |amount: u64| amount as f64 / budget.unit.scale();
    wire::Budget {
        username: member_name,
        unit: budget.unit.as_str().to_owned(),
        period: budget.period.as_str().to_owned(),
        warn: budget.warn.map(amount),
        cap: budget.cap.map(amount),
        spent: amount(budget.spent),
        state: budget.state().as_str().to_owned(),
        ends_at: budget.ends_at,
    }
}

/// Records an event when a budget reaches its warning or its cap: once for each in a period.
pub async fn record_levels(app: &App) -> Result<()> {
    let (db, now) = (app.db(), app.db().now().await?);
    for named in budgets::list(db, &budgets::projects(db).await?, now).await? {
        let budget = &named.budget;
        let (level, reason, limit) = match budget.state() {
            BudgetState::Within => continue,
            BudgetState::Warning => (1, "budget_warning", budget.warn),
            BudgetState::Exhausted => (2, "budget_exhausted", budget.cap),
        };
        if named.noted_level >= level {
            continue;
        }
        let about = EventSubject {
            entity: Entity::Project,
            id: budget.project.0,
            name: &named.project_name,
            project: Some(budget.project),
        };
        let what = if level == 2 {
            "is used up: no job starts before"
        } else {
            "has reached its warning; it ends at"
        };
        let message = format!(
            "Budget{} of {} for this {} {what} {} ({} spent)",
            of(named.member_name.as_deref()),
            budget.unit.amount(limit.unwrap_or_default()),
            budget.period,
            budget.ends_at,
            budget.unit.amount(budget.spent)
        );
        let reported = note(db, None, &about, reason, message)?;
        let unit = Unit::new().and([budgets::record_level(named.id, named.first_day, level)]).and(reported);
        // Stale if another server was first.
        db.write(unit).await?;
    }
    Ok(())
}

/// Records the events until the server stops.
pub(crate) async fn watch(app: App) {
    loop {
        tokio::time::sleep(WATCH_INTERVAL).await;
        if let Err(error) = record_levels(&app).await {
            tracing::debug!(%error, "failed to compare the budgets with what is spent");
        }
    }
}
