//! Costs of a project's instances.

use windlass_api::costs as wire;
use windlass_model::time::Timestamp;

use crate::{
    app::App,
    auth::ProjectScope,
    db::costs::{self, CostGroup, Period, hours},
    error::{Error, Result},
};

const LIMIT_MAX: i64 = 1000;

pub async fn list(
    app: &App,
    scope: &ProjectScope,
    requested: &wire::ListRequest,
) -> Result<wire::CostReport> {
    if !(1..=LIMIT_MAX).contains(&requested.limit) {
        return Err(Error::field("limit", "must be from 1 to 1000"));
    }
    let now = app.db().now().await?;
    let until = requested.until.unwrap_or(now).min(now);
    let since = requested.since.unwrap_or(Timestamp(0));
    if since > until {
        return Err(Error::field("since", "must be before `until`, and not in the future"));
    }
    let by = match requested.by {
        wire::CostGrouping::Run => CostGroup::Run,
        wire::CostGrouping::User => CostGroup::User,
        wire::CostGrouping::Fleet => CostGroup::Fleet,
    };
    let (project, period) = (scope.project.id, Period { since, until });
    let lines = costs::top_lines(app.db(), project, by, period, requested.limit).await?;
    let (count, time, price_by_time) = costs::total(app.db(), project, by, period).await?;
    let item = |line: costs::CostLine| wire::CostItem {
        id: line.id,
        name: line.name,
        user: line.user_name,
        count: line.count,
        hours: hours(line.time),
        cost: hours(line.price_by_time),
    };
    Ok(wire::CostReport {
        since,
        until,
        items: lines.into_iter().map(item).collect(),
        total: wire::CostTotal { count, hours: hours(time), cost: hours(price_by_time) },
    })
}
