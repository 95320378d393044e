//! Recorded refusals of locations, with the ids of the locations, and the changes that would help.

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;
use uuid::Uuid;
use windlass_api::{
    Document,
    explanations::{Cure, Patch, Refusal, Shortfall},
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
pub(crate) struct RecordedRefusals {
    #[serde(default)]
    pub(crate) refusals: Vec<RecordedRefusal>,
    #[serde(default)]
    pub(crate) left_out: u32,
}

#[derive(Debug, Deserialize)]
pub(crate) struct RecordedRefusal {
    pub(crate) place: String,
    pub(crate) count: u32,
    pub(crate) shortfalls: Vec<Shortfall>,
}

impl RecordedRefusals {
    pub(crate) fn of(document: Option<&Document>) -> Self {
        document.and_then(|document| serde_json::from_value(document.value().ok()?).ok()).unwrap_or_default()
    }
}

/// Ids of the instances and fleets of a project, by name.
#[derive(Default)]
pub(crate) struct Locations {
    instances: HashMap<String, Uuid>,
    fleets: HashMap<String, Uuid>,
}

impl Locations {
    pub(crate) async fn load(app: &App, project: ProjectId) -> Result<Self> {
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

    pub(crate) fn refusal(&self, recorded: RecordedRefusal) -> Refusal {
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
pub(crate) fn cures<'a>(refusals: impl IntoIterator<Item = &'a Refusal>) -> Vec<Cure> {
    let mut found = BTreeMap::<String, Cure>::new();
    for refusal in refusals {
        // What passes by itself needs no change.
        let permanent: Vec<&Shortfall> = refusal.shortfalls.iter().filter(|short| !short.passes).collect();
        if permanent.is_empty() || permanent.iter().any(|short| short.cure.is_empty()) {
            continue;
        }
        let message = permanent.iter().map(|short| short.cure.as_str()).collect::<Vec<_>>().join(", and ");
        let starts_now = permanent.len() == refusal.shortfalls.len();
        let new = || Cure { message: message.clone(), patch: merged(&permanent), fits: 0, starts_now: false };
        let cure = found.entry(message.clone()).or_insert_with(new);
        cure.fits += refusal.count;
        cure.starts_now |= starts_now && cure.patch.is_some();
    }
    let mut cures: Vec<Cure> = found.into_values().collect();
    cures.sort_by_key(|cure| (cure.patch.is_none(), std::cmp::Reverse(cure.fits)));
    cures.truncate(CURES_MAX);
    cures
}

/// All patches together, if each shortfall has one.
fn merged(shortfalls: &[&Shortfall]) -> Option<Patch> {
    let mut all = Patch::new();
    for short in shortfalls {
        all.extend(short.patch.clone()?);
    }
    Some(all)
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
            patch: None,
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

    #[test]
    fn a_cure_has_a_patch_if_each_of_its_changes_has_one() {
        let short = |cure: &str, path: Option<&str>| Shortfall {
            kind: "cpus".into(),
            message: String::new(),
            cure: cure.into(),
            passes: false,
            patch: path.map(|path| Patch::from([(path.to_owned(), 1.into())])),
        };
        let refusal = |shortfalls| Refusal {
            place: "a".into(),
            place_id: None,
            place_kind: "offer".into(),
            count: 1,
            shortfalls,
        };
        let whole = refusal(vec![short("a", Some("cpu")), short("b", Some("gpu"))]);
        let partial = refusal(vec![short("c", Some("cpu")), short("d", None)]);
        let found = cures(&[partial, whole]);
        let patch = found[0].patch.clone().unwrap();
        assert_eq!((patch.len(), found[0].starts_now, found[0].message.as_str()), (2, true, "a, and b"));
        assert!(found[1].patch.is_none() && !found[1].starts_now);
    }
}
