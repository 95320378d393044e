//! Costs of a project's instances.

use std::collections::{BTreeMap, HashMap};

use windlass_api::costs as wire;
use windlass_model::{
    plan::offers::Offer,
    time::{Span, Timestamp},
};

use crate::{
    app::App,
    auth::ProjectScope,
    db::{
        DbError,
        costs::{self, CostGroup, CostInterval, Period, hours},
        documents::INSTANCE_TYPE,
    },
    error::{Error, Result},
};
use serde::Deserialize;

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
    let mut report_series = (None, None);
    if let Some(every) = requested.every {
        // A series without a beginning starts with its first cost.
        let intervals = costs::intervals(app.db(), project, by, period).await?;
        let first = intervals.iter().map(|one| one.from).min().unwrap_or(until);
        let steps = Steps::of(every, since.max(first), until)?;
        let prices = OnDemandPrices::load(app).await;
        report_series = (Some(series(&intervals, requested.by, &steps)), Some(markets(&intervals, &prices)?));
    }
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
        series: report_series.0,
        markets: report_series.1,
    })
}

/// Maximum number of steps of a series.
const STEPS_MAX: i64 = 800;
/// Items of a series; the others are one item.
const SERIES_ITEMS: usize = 6;

/// Even steps of a series.
struct Steps {
    first: Timestamp,
    width: Span,
    count: usize,
}

impl Steps {
    fn of(every: wire::CostStep, since: Timestamp, until: Timestamp) -> Result<Self> {
        let width = match every {
            wire::CostStep::Hour => Span::hours(1),
            wire::CostStep::Day => Span::days(1),
        };
        let first = Timestamp(since.0 - since.0.rem_euclid(width.0));
        let count = (until.0 - first.0).div_euclid(width.0) + 1;
        if count > STEPS_MAX {
            let reason = format!("the period has {count} steps, more than {STEPS_MAX}; set a later `since`");
            return Err(Error::field("every", reason));
        }
        Ok(Self { first, width, count: usize::try_from(count).unwrap_or(1) })
    }

    fn times(&self) -> Vec<Timestamp> {
        (0..).take(self.count).map(|at: i64| Timestamp(self.first.0 + at * self.width.0)).collect()
    }

    /// Adds an amount per microsecond to every step that the interval touches.
    fn spread(&self, costs: &mut [f64], from: Timestamp, to: Timestamp, per_us: f64) {
        let first = (from.0 - self.first.0).div_euclid(self.width.0).max(0);
        for (at, cost) in costs.iter_mut().enumerate().skip(usize::try_from(first).unwrap_or(0)) {
            let start = self.first.0 + i64::try_from(at).unwrap_or(0) * self.width.0;
            if start >= to.0 {
                break;
            }
            #[expect(clippy::cast_precision_loss, reason = "microseconds of a step")]
            let part = (to.0.min(start + self.width.0) - from.0.max(start)).max(0) as f64;
            *cost += part * per_us;
        }
    }
}

fn series(intervals: &[CostInterval], by: wire::CostGrouping, steps: &Steps) -> wire::CostSeries {
    let mut items = BTreeMap::<&str, Vec<f64>>::new();
    for one in intervals {
        let name = if by == wire::CostGrouping::User { &one.user_name } else { &one.name };
        let costs = items.entry(name).or_insert_with(|| vec![0.0; steps.count]);
        steps.spread(costs, one.from, one.to, hours(one.price * one.share));
    }
    let mut items: Vec<wire::CostSeriesItem> = items
        .into_iter()
        .map(|(name, costs)| wire::CostSeriesItem { name: name.to_owned(), costs })
        .collect();
    let sum = |item: &wire::CostSeriesItem| item.costs.iter().sum::<f64>();
    items.sort_by(|one, other| sum(other).total_cmp(&sum(one)));
    if items.len() > SERIES_ITEMS {
        let mut others = vec![0.0; steps.count];
        for item in items.drain(SERIES_ITEMS..) {
            others.iter_mut().zip(item.costs).for_each(|(sum, cost)| *sum += cost);
        }
        items.push(wire::CostSeriesItem { name: "others".to_owned(), costs: others });
    }
    wire::CostSeries { times: steps.times(), items }
}

/// Prices on demand of the instance types that backends offer now.
pub(crate) struct OnDemandPrices(HashMap<(String, String, String), f64>);

impl OnDemandPrices {
    pub(crate) async fn load(app: &App) -> Self {
        let seen = app.market().seen().await;
        let on_demand = seen.offers.iter().filter(|offer| !offer.host.spot);
        let price = |offer: &Offer| {
            let key = (offer.backend.clone(), offer.region.clone(), offer.instance_type.clone());
            Some((key, offer.price.known_dollars()?))
        };
        Self(on_demand.filter_map(price).collect())
    }

    /// Dollars per hour of the whole instance, if it is known.
    pub(crate) fn of(&self, interval: &CostInterval) -> Result<Option<f64>, DbError> {
        if !interval.spot {
            return Ok(Some(interval.price));
        }
        let row = format_args!("of an instance of `{}`", interval.name);
        let kind: Option<InstanceTypeName> =
            INSTANCE_TYPE.decode_opt(row, interval.instance_type.as_deref())?;
        let place = interval.backend.clone().zip(interval.region.clone()).zip(kind);
        Ok(place.and_then(|((backend, region), kind)| self.0.get(&(backend, region, kind.name)).copied()))
    }
}

/// Dollars of an interval at a price per hour of the whole instance.
#[expect(clippy::cast_precision_loss, reason = "microseconds of an interval")]
pub(crate) fn cost_at(interval: &CostInterval, price: f64) -> f64 {
    hours((interval.to.0 - interval.from.0).max(0) as f64 * price * interval.share)
}

fn markets(intervals: &[CostInterval], prices: &OnDemandPrices) -> Result<wire::MarketCosts, DbError> {
    let mut sum = wire::MarketCosts { spot_at_on_demand: Some(0.0), ..wire::MarketCosts::default() };
    for one in intervals {
        let cost = cost_at(one, one.price);
        if one.spot {
            sum.spot += cost;
            let on_demand = prices.of(one)?.map(|price| cost_at(one, price));
            sum.spot_at_on_demand = sum.spot_at_on_demand.zip(on_demand).map(|(sum, cost)| sum + cost);
        } else {
            sum.on_demand += cost;
        }
    }
    Ok(sum)
}

/// Part of an instance type.
#[derive(Deserialize)]
struct InstanceTypeName {
    name: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interval(name: &str, from: i64, to: i64, price: f64, spot: bool) -> CostInterval {
        CostInterval {
            name: name.into(),
            user_name: "ada".into(),
            from: Timestamp::from_secs(from),
            to: Timestamp::from_secs(to),
            price,
            spot,
            backend: Some("aws".into()),
            region: Some("eu".into()),
            instance_type: Some(r#"{"name":"m5"}"#.into()),
            share: 0.5,
        }
    }

    #[test]
    fn costs_are_spread_over_the_steps_that_they_touch() {
        let steps = Steps::of(wire::CostStep::Hour, Timestamp::from_secs(3700), Timestamp::from_secs(10_000))
            .unwrap();
        assert_eq!((steps.first, steps.count), (Timestamp::from_secs(3600), 2));
        let all = [interval("a", 3600, 9000, 2.0, false), interval("b", 7200, 7200, 9.0, false)];
        let series = series(&all, wire::CostGrouping::Run, &steps);
        let costs: Vec<i64> =
            series.items[0].costs.iter().map(|cost| (cost * 1000.0).round() as i64).collect();
        assert_eq!((series.items[0].name.as_str(), costs), ("a", vec![1000, 500]));
        assert!(Steps::of(wire::CostStep::Hour, Timestamp(0), Timestamp::from_secs(3_000_000)).is_err());
    }

    #[test]
    fn the_items_beyond_the_first_are_one_item() {
        let steps = Steps::of(wire::CostStep::Day, Timestamp(0), Timestamp::from_secs(10)).unwrap();
        let names: Vec<String> = (0..9).map(|number| format!("run-{number}")).collect();
        let all: Vec<CostInterval> = names.iter().map(|name| interval(name, 0, 3600, 1.0, false)).collect();
        let series = series(&all, wire::CostGrouping::Run, &steps);
        assert_eq!((series.items.len(), series.items[6].name.as_str()), (7, "others"));
        assert!((series.items[6].costs[0] - 1.5).abs() < 1e-9);
    }

    #[test]
    fn savings_are_unknown_without_the_price_on_demand() {
        let all = [interval("a", 0, 3600, 1.0, true), interval("a", 0, 3600, 2.0, false)];
        let none = OnDemandPrices(HashMap::new());
        let sum = markets(&all, &none).unwrap();
        assert_eq!((sum.spot, sum.on_demand, sum.spot_at_on_demand), (0.5, 1.0, None));
        let key = ("aws".to_owned(), "eu".to_owned(), "m5".to_owned());
        let sum = markets(&all, &OnDemandPrices(HashMap::from([(key, 3.0)]))).unwrap();
        assert_eq!(sum.spot_at_on_demand, Some(1.5));
    }
}
