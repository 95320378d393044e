//! Variants of a run: would they start, and at what price.

use serde_json::Value;
use windlass_api::{
    Document,
    explanations::{Refusal, Variant, VariantResult, WhatIfRequest, WhatIfResult},
    runs::{JobPlan, PlanRequest},
};

use super::refusals::{Locations, RecordedRefusals};
use crate::{
    app::App,
    auth::ProjectScope,
    db::{documents::RUN_SPEC, runs as rows},
    error::{Error, Result},
    services::runs,
};

const VARIANTS_MAX: usize = 8;
const OFFERS_MAX: i64 = 10;

pub(crate) async fn what_if(
    app: &App,
    scope: &ProjectScope,
    requested: WhatIfRequest,
) -> Result<WhatIfResult> {
    if !(1..=VARIANTS_MAX).contains(&requested.variants.len()) {
        return Err(Error::field("variants", format!("must have from 1 to {VARIANTS_MAX} items")));
    }
    let base = match (requested.run_name, requested.run_spec) {
        (Some(name), None) => {
            let found = rows::find_by_name(app.db(), scope.project.id, &name).await?;
            let found = found.ok_or_else(|| Error::absent("Run"))?.run;
            RUN_SPEC.decode(found.id, &found.spec)?
        }
        (None, Some(spec)) => spec.value()?,
        _ => return Err(Error::refused("expected either `run_name` or `run_spec`")),
    };
    let locations = Locations::load(app, scope.project.id).await?;
    let mut variants = Vec::new();
    for variant in requested.variants {
        let mut spec = base.clone();
        apply(&mut spec, &variant)?;
        let plan = PlanRequest {
            run_spec: Document::new(&spec)?,
            max_offers: Some(OFFERS_MAX),
            full_offers: false,
            unallocated_resources: false,
            reverse_offers: false,
            for_offers_only: true,
        };
        let plan = runs::plan(app, scope, plan).await?;
        variants.push(result(variant, plan.job_plans, &locations));
    }
    Ok(WhatIfResult { variants })
}

/// Writes the values of a patch into the configuration; null removes a field.
fn apply(spec: &mut Value, variant: &Variant) -> Result<()> {
    for (path, value) in &variant.patch {
        let mut at = &mut spec["configuration"];
        let mut parts = path.split('.').peekable();
        while let Some(part) = parts.next() {
            if !at.is_object() {
                *at = Value::Object(serde_json::Map::new());
            }
            let Some(fields) = at.as_object_mut() else { break };
            if parts.peek().is_some() {
                at = fields.entry(part).or_insert(Value::Null);
            } else if value.is_null() {
                fields.remove(part);
                break;
            } else if value.is_object() || value.is_array() {
                return Err(Error::field("variants", "a patch contains only texts, numbers and booleans"));
            } else {
                fields.insert(part.to_owned(), value.clone());
                break;
            }
        }
    }
    Ok(())
}

fn result(variant: Variant, plans: Vec<JobPlan>, locations: &Locations) -> VariantResult {
    let starts_now = plans.iter().all(|plan| plan.why.is_none());
    let refused = plans.iter().find(|plan| plan.why.is_some());
    let recorded = RecordedRefusals::of(refused.and_then(|plan| plan.why.as_ref()));
    let left_out = recorded.left_out;
    let refusals: Vec<Refusal> = recorded.refusals.into_iter().map(|one| locations.refusal(one)).collect();
    let passes = refusals.iter().any(|one| one.shortfalls.iter().all(|short| short.passes));
    let first = plans.into_iter().next();
    let (offers, total_offers) = first.map_or((Vec::new(), 0), |plan| (plan.offers, plan.total_offers));
    VariantResult {
        label: variant.label,
        patch: variant.patch,
        starts_now,
        passes: starts_now || passes,
        cheapest: offers.iter().map(|offer| offer.price).reduce(f64::min),
        offers,
        total_offers,
        refusals,
        left_out,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_patch_sets_and_removes_fields_of_the_configuration() {
        let mut spec = json!({ "configuration": { "type": "task", "resources": { "gpu": { "count": 8, "memory": "80GB" } } } });
        let patch = json!({ "resources.gpu.count": 4, "resources.gpu.memory": null, "spot_policy": "spot", "retry.duration": "1h" });
        let patch = patch.as_object().unwrap().clone().into_iter().collect();
        apply(&mut spec, &Variant { label: "x".into(), patch }).unwrap();
        let expected = json!({ "configuration": {
            "type": "task", "resources": { "gpu": { "count": 4 } }, "spot_policy": "spot", "retry": { "duration": "1h" },
        } });
        assert_eq!(spec, expected);
        let patch = [("a".to_owned(), json!([1]))].into_iter().collect();
        assert!(apply(&mut spec, &Variant { label: "x".into(), patch }).is_err());
    }
}
