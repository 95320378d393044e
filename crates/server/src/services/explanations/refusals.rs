//! Recorded refusals of locations, with the ids of the locations, and the changes that would help.

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;
use uuid::Uuid;
use windlass_api::{
    Document,
    explanations::{Cure, Refusal, Shortfall},
};
use windlass_model::id::ProjectId;

use crate::{
    app::App,
    db::{Page, fleets, instances},
    error::Result,
};

const INSTANCES_MAX: i64 = 10_000;
const CURES_MAX: usize = 5;

/// Refusals as the scheduler recorded them.
#[derive(Debug, Default, Deserialize)]
pub(super) struct RecordedRefusals {
    #[serde(default)]
    pub(super) refusals: Vec<RecordedRefusal>,
    #[serde(default)]
    pub(super) left_out: u32,
}

#[derive(Debug, Deserialize)]
pub(super) struct RecordedRefusal {
    pub(super) place: String,
    pub(super) count: u32,
    pub(super) shortfalls: Vec<Shortfall>,
}

impl RecordedRefusals {
    pub(super) fn of(document: Option<&Document>) -> Self {
        document.and_then(|document| serde_json::from_value(document.value().ok()?).ok()).unwrap_or_default()
    }

    pub(super) fn parse(text: Option<&str>) -> Self {
        text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
    }
}

/// Ids of the instances and fleets of a project, by name.
#[derive(Default)]
pub(super) struct Locations {
    instances: HashMap<String, Uuid>,
    fleets: HashMap<String, Uuid>,
}

impl Locations {
    pub(super) async fn load(app: &App, project: ProjectId) -> Result<Self> {
        let query = instances::Query {
            projects: Some(vec![project]),
            only_active: true,
            page: Page { limit: INSTANCES_MAX, ..Page::default() },
            ..instances::Query::default()
        };
        let found = instances::list(app.db(), &query).await?;
        let fleet_ids: Vec<_> = found.iter().filter_map(|instance| instance.fleet_id).collect();
        let fleets = fleets::names(app.db(), &fleet_ids).await?;
        Ok(Self {
            instances: found.into_iter().map(|instance| (instance.name, instance.id.0)).collect(),
            fleets: fleets.into_iter().map(|(id, name)| (name, id.0)).collect(),
        })
    }

    pub(super) fn refusal(&self, recorded: RecordedRefusal) -> Refusal {
        let fleet = recorded.place.rsplit_once("fleet ").and_then(|(_, name)| self.fleets.get(name));
        let (place_id, kind) = match (self.instances.get(&recorded.place), fleet) {
            (Some(id), _) => (Some(*id), "instance"),
            (None, Some(id)) => (Some(*id), "fleet"),
            (None, None) => (None, "offer"),
        };
        Refusal {
            place: recorded.place,
            place_id,
            place_kind: kind.to_owned(),
            count: recorded.count,
            shortfalls: recorded.shortfalls,
        }
    }
}

/// Changes after which nothing else is missing somewhere: those that help in most locations first.
pub(super) fn cures<'a>(refusals: impl IntoIterator<Item = &'a Refusal>) -> Vec<Cure> {
    let mut fits = BTreeMap::<String, u32>::new();
    for refusal in refusals {
        // What passes by itself needs no change.
        let permanent: Vec<&Shortfall> = refusal.shortfalls.iter().filter(|short| !short.passes).collect();
        if permanent.is_empty() || permanent.iter().any(|short| short.cure.is_empty()) {
            continue;
        }
        let message = permanent.iter().map(|short| short.cure.as_str()).collect::<Vec<_>>().join(", and ");
        *fits.entry(message).or_default() += refusal.count;
    }
    let mut cures: Vec<Cure> =
        fits.into_iter().map(|(message, fits)| Cure { message, fits, starts_now: false }).collect();
    cures.sort_by_key(|cure| std::cmp::Reverse(cure.fits));
    cures.truncate(CURES_MAX);
    cures
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(place: &str, count: u32, shortfalls: &[(&str, bool)]) -> Refusal {
        let short = |(cure, passes): &(&str, bool)| Shortfall {
            kind: "cpus".into(),
            message: "needs 8 CPUs, has 2".into(),
            cure: (*cure).into(),
            passes: *passes,
        };
        let shortfalls = shortfalls.iter().map(short).collect();
        Refusal { place: place.into(), place_id: None, place_kind: "offer".into(), count, shortfalls }
    }

    #[test]
    fn the_change_that_helps_in_most_locations_comes_first() {
        let all = [
            refusal("a", 1, &[("lower cpu to 2", false)]),
            refusal("b", 3, &[("lower gpu to 1", false), ("wait", true)]),
            refusal("c", 9, &[("lower cpu to 2", false), ("", false)]),
            refusal("d", 9, &[("wait", true)]),
            refusal("e", 1, &[("lower cpu to 2", false)]),
        ];
        let found = cures(&all);
        let shown: Vec<_> = found.iter().map(|cure| (cure.message.as_str(), cure.fits)).collect();
        assert_eq!(shown, [("lower gpu to 1", 3), ("lower cpu to 2", 2)]);
    }

    #[test]
    fn locations_are_found_by_their_names() {
        let (one, two) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let known = Locations {
            instances: HashMap::from([("gpu-0".to_owned(), one)]),
            fleets: HashMap::from([("gpu".to_owned(), two)]),
        };
        let kind = |place: &str| {
            let recorded = RecordedRefusal { place: place.into(), count: 1, shortfalls: Vec::new() };
            let found = known.refusal(recorded);
            (found.place_kind, found.place_id)
        };
        assert_eq!(kind("gpu-0"), ("instance".into(), Some(one)));
        assert_eq!(kind("fleet gpu"), ("fleet".into(), Some(two)));
        assert_eq!(kind("aws us-east-1 p4d"), ("offer".into(), None));
    }
}
