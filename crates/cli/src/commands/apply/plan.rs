//! Text form of a plan.

use std::collections::BTreeSet;

use serde_json::Value;
use windlass_api::{
    Document,
    offers::Offer,
    runs::{ImageReport, JobPlan, RunPlan},
};
use windlass_model::config::job_spec::DefaultImageSource;

use crate::output::{
    self, format,
    style::Style,
    table::{Cell, Table},
};

/// Maximum number of refused locations in a plan; `windlass why` lists all.
const REFUSALS_MAX: usize = 5;

/// Prints the heading and the best offers of a run's plan to stderr, because stdout belongs to the job.
pub(crate) fn print_plan(plan: &RunPlan) {
    let spec = plan.effective_run_spec.as_ref().unwrap_or(&plan.run_spec).value().unwrap_or_default();
    let configuration = &spec["configuration"];
    let mut lines = vec![("Project", plan.project_name.clone()), ("User", plan.user.clone())];
    let kind = configuration["type"].as_str().unwrap_or("run");
    let nodes = configuration["nodes"].as_i64().filter(|nodes| *nodes > 1);
    let kind = nodes.map_or_else(|| kind.to_owned(), |nodes| format!("{kind}, {nodes} nodes"));
    let name = spec["run_name"].as_str().unwrap_or("(generated name)");
    lines.push(("Run", format!("{name} ({kind})")));
    let distinct = distinct_requirements(&plan.job_plans);
    for (number, (wanted, _)) in distinct.iter().enumerate() {
        let label = if number == 0 { "Resources" } else { "" };
        lines.push((label, format_resources(&wanted["resources"])));
    }
    let places: BTreeSet<&str> =
        plan.job_plans.iter().flat_map(|job| &job.runs_in).map(String::as_str).collect();
    if !places.is_empty() {
        lines.push(("Runs in", places.into_iter().collect::<Vec<_>>().join(", or ")));
    }
    for (number, image) in plan.images.iter().enumerate() {
        lines.push((if number == 0 { "Image" } else { "" }, format_image(image)));
    }
    if let Some(first) = plan.job_plans.first() {
        let job = first.job_spec.value().unwrap_or_default();
        lines.extend(format_default_image(&job).map(|text| ("Default image", text)));
        let requirements = &job["requirements"];
        if let Some(price) = requirements["max_price"].as_f64() {
            lines.push(("Max price", format!("{} per hour", format::price(price))));
        }
        lines.extend(placement_facts(&spec));
        if let Some(secs) = job["max_duration"].as_i64() {
            lines.push(("Max duration", format::span(windlass_model::time::Span::secs(secs))));
        }
        lines.push(("Cost ceiling", format_max_cost(plan)));
        if let Some(events) = job["retry"]["on_events"].as_array() {
            let events: Vec<&str> = events.iter().filter_map(Value::as_str).collect();
            lines.push(("Retry on", events.join(", ")));
        }
    }
    let width = lines.iter().map(|(label, _)| label.len()).max().unwrap_or(0);
    for (label, text) in lines {
        output::print_message(&output::printable(&format!("{label:width$}  {text}")));
    }
    output::print_message("");
    let all: Vec<Offer> = distinct.iter().flat_map(|(_, job)| job.offers.iter().cloned()).collect();
    let total: i64 = distinct.iter().map(|(_, job)| job.total_offers).sum();
    print_offers(&all, total);
    let (waits, misfits) = refusal_lists(plan, all.is_empty());
    print_list("Does not fit:", &misfits);
    print_list(
        if all.is_empty() { "Nothing fits now:" } else { "The run would not start immediately:" },
        &waits,
    );
    // A run that waits alone needs no place in the queue.
    if let Some(turn) = plan.turn.as_ref().filter(|turn| turn.length > 1 || turn.starts_at.is_some()) {
        print_list("In the queue:", &turn.sentences);
    }
}

fn print_list(heading: &str, lines: &[String]) {
    if lines.is_empty() {
        return;
    }
    output::print_message(heading);
    lines.iter().for_each(|line| output::print_message(&output::printable(&format!("  {line}"))));
    output::print_message("");
}

/// Returns why the jobs would wait, and which offers do not fit; a reason is in one of the lists, once. Jobs with equal
/// requirements have equal reasons, and what does not fit is a part of why a job waits.
fn refusal_lists(plan: &RunPlan, nothing_fits: bool) -> (Vec<String>, Vec<String>) {
    let value = |document: Option<&Document>| document.and_then(|document| document.value().ok());
    let mut reported = BTreeSet::new();
    let mut unreported = |mut report: Value| {
        let Some(refusals) = report["refusals"].as_array_mut() else { return Vec::new() };
        refusals.retain(|refusal| reported.insert(refusal["shortfalls"].to_string()));
        if refusals.is_empty() { Vec::new() } else { format_refusals(&report, REFUSALS_MAX) }
    };
    let mut waits = Vec::new();
    for job in &plan.job_plans {
        waits.extend(value(job.why.as_ref()).map(&mut unreported).unwrap_or_default());
    }
    let misfits = plan.job_plans.iter().find_map(|job| value(job.misfits.as_ref()));
    let misfits = misfits.filter(|_| !nothing_fits).map(unreported).unwrap_or_default();
    (waits, misfits)
}

/// `team/app:1 for linux/amd64, runs as app`, or the reason why it was not checked.
fn format_image(image: &ImageReport) -> String {
    if let Some(reason) = &image.not_checked {
        return format!("{} was not checked: {reason}", image.name);
    }
    let platforms = match image.platforms.as_slice() {
        [] => String::new(),
        known => format!(" for {}", known.join(", ")),
    };
    let user = image.user.as_ref().map(|user| format!(", runs as {user}")).unwrap_or_default();
    format!("{}{platforms}{user}", image.name)
}

/// `debian:12, set by the project`: image on instances that run only containers, if the run names none.
fn format_default_image(job: &Value) -> Option<String> {
    let image = job["default_image"].as_str()?;
    let source: Option<DefaultImageSource> = serde_json::from_value(job["default_image_from"].clone()).ok();
    Some(format!("{image}, set by {}", source.unwrap_or_default()))
}

/// Returns one job for each set of requirements: nodes with equal requirements get the same offers.
fn distinct_requirements(plans: &[JobPlan]) -> Vec<(Value, &JobPlan)> {
    let mut all: Vec<(Value, &JobPlan)> = Vec::new();
    for job in plans {
        let wanted = job.job_spec.value().unwrap_or_default()["requirements"].clone();
        if !all.iter().any(|(other, _)| *other == wanted) {
            all.push((wanted, job));
        }
    }
    all
}

/// Placement constraints of the configuration or its profile.
fn placement_facts(spec: &Value) -> Vec<(&'static str, String)> {
    let message = |key: &str| {
        let own = &spec["configuration"][key];
        if own.is_null() { &spec["profile"][key] } else { own }
    };
    let mut lines = Vec::new();
    let spot = match message("spot_policy").as_str() {
        Some("spot") => Some("only"),
        Some("on-demand") => Some("no, on-demand only"),
        Some("auto") => Some("either"),
        Some(_) | None => None,
    };
    lines.extend(spot.map(|spot| ("Spot", spot.to_owned())));
    let lists = [
        ("Backends", "backends"),
        ("Regions", "regions"),
        ("Instance types", "instance_types"),
        ("Fleets", "fleets"),
    ];
    for (label, key) in lists {
        let names: Vec<String> = message(key).as_array().into_iter().flatten().map(fleet_name).collect();
        if !names.is_empty() {
            lines.push((label, names.join(", ")));
        }
    }
    if message("creation_policy") == "reuse" {
        lines.push(("New instances", "no, existing instances only".to_owned()));
    }
    lines
}

/// `gpus`, or `lab/gpus` for a fleet of another project.
fn fleet_name(value: &Value) -> String {
    let project = value["project"].as_str().map(|project| format!("{project}/")).unwrap_or_default();
    let name = value.as_str().or_else(|| value["name"].as_str()).unwrap_or("?");
    format!("{project}{name}")
}

/// Maximum cost of the run: the most expensive offer that it may use, for its maximum duration.
fn format_max_cost(plan: &RunPlan) -> String {
    let (mut sum, mut hourly) = (Some(0.0), 0.0);
    for job in &plan.job_plans {
        let spec = job.job_spec.value().unwrap_or_default();
        let Some(dearest) = job.max_price else { return "unknown: nothing fits now".to_owned() };
        let price = spec["requirements"]["max_price"].as_f64().map_or(dearest, |max| dearest.min(max));
        hourly += price;
        let hours = spec["max_duration"].as_f64().map(|secs| secs / 3600.0);
        sum = sum.zip(hours).map(|(sum, hours)| sum + price * hours);
    }
    match sum {
        _ if hourly == 0.0 => format::price(0.0),
        Some(sum) => format!("{} (at most {} per hour)", format::price(sum), format::price(hourly)),
        None => format!("none: {} per hour, and `max_duration` is not set", format::price(hourly)),
    }
}

/// Renders why a job cannot be placed: one line for each location, the nearest match first, with all reasons and their
/// fixes.
pub(crate) fn format_refusals(why: &Value, most: usize) -> Vec<String> {
    let all = why["refusals"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut lines: Vec<String> = all.iter().take(most).map(format_refusal).collect();
    let rest = all.len().saturating_sub(most) as u64 + why["left_out"].as_u64().unwrap_or(0);
    if rest > 0 {
        lines.push(format!(
            "and {}",
            format::count(usize::try_from(rest).unwrap_or(usize::MAX), "other place")
        ));
    }
    lines
}

fn format_refusal(one: &Value) -> String {
    // The local machine uses `local` as backend, region and instance type.
    let mut words: Vec<&str> = one["place"].as_str().unwrap_or("?").split(' ').collect();
    words.dedup();
    let mut line = words.join(" ");
    if let Some(more) = one["count"].as_u64().filter(|count| *count > 1) {
        line.push_str(&format!(" and {} more", more - 1));
    }
    for (index, short) in one["shortfalls"].as_array().into_iter().flatten().enumerate() {
        line.push_str(if index == 0 { ": " } else { "; " });
        line.push_str(short["message"].as_str().unwrap_or("?"));
        if let Some(cure) = short["cure"].as_str().filter(|cure| !cure.is_empty()) {
            line.push_str(&format!(" ({cure})"));
        }
    }
    line
}

pub(crate) fn print_offers(all: &[Offer], total: i64) {
    if all.is_empty() {
        return;
    }
    let mut table = Table::new(["#", "BACKEND", "RESOURCES", "INSTANCE TYPE", "PRICE", "AVAILABILITY"]);
    for (number, offer) in all.iter().enumerate() {
        let resources = serde_json::to_value(&offer.instance.resources).unwrap_or_default();
        let backend = serde_json::to_value(offer.backend).unwrap_or_default();
        let backend = format::backend(backend.as_str().unwrap_or("?"), &offer.region).to_owned();
        let backend = if offer.region.is_empty() || offer.region == backend || offer.region == "remote" {
            backend
        } else {
            format!("{backend} ({})", offer.region)
        };
        let mut name = offer.instance.name.clone();
        if offer.total_blocks > 1 {
            name = format!("{name} ({}/{})", offer.blocks, offer.total_blocks);
        }
        table.row(vec![
            (number + 1).to_string().into(),
            backend.into(),
            format::resources(&resources).into(),
            name.into(),
            format::price(offer.price).into(),
            Cell::status(offer.availability.replace('_', " ")),
        ]);
    }
    let columns = output::columns(&std::io::stderr());
    table.lines_fitting(Style::stderr(), columns).iter().for_each(|line| output::print_message(line));
    let shown = i64::try_from(all.len()).unwrap_or(i64::MAX);
    if total > shown {
        output::print_message(&format!("Showing {shown} of {total} offers."));
    }
    output::print_message("");
}

/// `cpu=2.. mem=8GB.. gpu=H100:80GB:8` for requested resources.
pub(crate) fn format_resources(wanted: &Value) -> String {
    let mut parts = Vec::new();
    let cpu = &wanted["cpu"];
    if let Some(count) = format_range(&cpu["count"], format_count) {
        let arch = cpu["arch"].as_str().map(|arch| format!("{arch}:")).unwrap_or_default();
        parts.push(format!("cpu={arch}{count}"));
    }
    parts.extend(format_range(&wanted["memory"], format::size).map(|memory| format!("mem={memory}")));
    parts.extend(format_range(&wanted["disk"]["size"], format::size).map(|disk| format!("disk={disk}")));
    parts.extend(format_gpus(&wanted["gpu"]));
    if parts.is_empty() { "any".to_owned() } else { parts.join(" ") }
}

/// `gpu=H100:80GB:8`, and what else is required of them: `gpu=1 compute_capability=9.0..`.
fn format_gpus(gpu: &Value) -> Vec<String> {
    let is_requested = gpu["count"]["min"].as_i64().unwrap_or(0) > 0 || gpu["name"].is_array();
    if gpu["count"]["max"].as_i64() == Some(0) || !is_requested {
        return Vec::new();
    }
    let names = gpu["name"].as_array().into_iter().flatten().filter_map(Value::as_str).collect::<Vec<_>>();
    // A name implies its vendor.
    let vendor = gpu["vendor"].as_str().filter(|_| names.is_empty()).unwrap_or_default();
    let mut all = vec![vendor.to_owned(), names.join(",")];
    all.extend(format_range(&gpu["memory"], format::size));
    all.extend(format_range(&gpu["count"], format_count));
    all.retain(|part| !part.is_empty());
    let mut parts = vec![format!("gpu={}", all.join(":"))];
    let total = format_range(&gpu["total_memory"], format::size);
    parts.extend(total.map(|total| format!("total_memory={total}")));
    let capability = &gpu["compute_capability"];
    if let (Some(major), Some(minor)) = (capability[0].as_u64(), capability[1].as_u64()) {
        parts.push(format!("compute_capability={major}.{minor}.."));
    }
    parts
}

fn format_count(number: f64) -> String {
    number.to_string()
}

fn format_range(value: &Value, shown: fn(f64) -> String) -> Option<String> {
    let bound = |value: &Value| value.as_f64().map(shown);
    match (bound(&value["min"]), bound(&value["max"])) {
        (None, None) => None,
        (Some(min), Some(max)) if min == max => Some(min),
        (min, max) => Some(format!("{}..{}", min.unwrap_or_default(), max.unwrap_or_default())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{format_refusals, format_resources};

    #[test]
    fn a_refusal_names_the_offer_every_shortfall_and_its_fix() {
        let short =
            |message, cure| json!({"kind": "cpus", "message": message, "cure": cure, "passes": false});
        let why = json!({"left_out": 3, "refusals": [
            {"place": "gpu-0", "count": 4, "shortfalls": [short("needs 8 CPUs, has 2", "lower cpu"), short("is full", "")]},
            {"place": "local local local in fleet local", "count": 1, "shortfalls": []},
        ]});
        let first = "gpu-0 and 3 more: needs 8 CPUs, has 2 (lower cpu); is full";
        assert_eq!(format_refusals(&why, 8), [first, "local in fleet local", "and 3 other places"]);
        assert_eq!(format_refusals(&why, 1), [first, "and 4 other places"]);
        assert!(format_refusals(&json!({}), 8).is_empty());
    }

    #[test]
    fn a_reason_is_in_one_list_of_the_plan_once() {
        let refusal = |place, message| json!({"place": place, "count": 1, "shortfalls": [{"message": message, "cure": ""}]});
        let (busy, small, other) =
            (refusal("a", "is busy"), refusal("b", "has 2 CPUs"), refusal("c", "has no GPU"));
        let plan = |offers: serde_json::Value| -> super::RunPlan {
            let job = |why: &[&serde_json::Value]| {
                json!({"job_spec": {}, "offers": offers, "total_offers": 1,
                    "why": {"refusals": why, "left_out": 0}, "misfits": {"refusals": [small, other], "left_out": 0}})
            };
            serde_json::from_value(json!({
                "project_name": "main", "user": "ada", "run_spec": {}, "action": "create",
                "job_plans": [job(&[&busy, &small]), job(&[&busy, &small])],
            }))
            .unwrap()
        };
        let (waits, misfits) = super::refusal_lists(&plan(json!([])), false);
        assert_eq!(
            (waits, misfits),
            (vec!["a: is busy".to_owned(), "b: has 2 CPUs".to_owned()], vec!["c: has no GPU".to_owned()])
        );
        let (waits, misfits) = super::refusal_lists(&plan(json!([])), true);
        assert_eq!((waits.len(), misfits.len()), (2, 0), "what waits is why nothing fits");
    }

    #[test]
    fn nodes_with_equal_requirements_share_one_offer_list() {
        let job = |cpus: i64| -> super::JobPlan {
            serde_json::from_value(
                json!({"job_spec": {"requirements": {"resources": {"cpu": {"count": {"min": cpus}}}}},
                "offers": [], "total_offers": 1}),
            )
            .unwrap()
        };
        assert_eq!(super::distinct_requirements(&[job(2), job(2), job(4)]).len(), 2);
    }

    #[test]
    fn plan_shows_placement_constraints() {
        let spec = json!({"configuration": {"spot_policy": "auto", "fleets": [{"project": "lab", "name": "gpus"}, "rack"],
            "creation_policy": "reuse", "regions": null}, "profile": {"regions": ["eu-west-1"], "spot_policy": "spot"}});
        let lines = [
            ("Spot", "either"),
            ("Regions", "eu-west-1"),
            ("Fleets", "lab/gpus, rack"),
            ("New instances", "no, existing instances only"),
        ];
        assert_eq!(super::placement_facts(&spec), lines.map(|(label, text)| (label, text.to_owned())));
        assert!(super::placement_facts(&json!({"configuration": {}, "profile": {}})).is_empty());
    }

    #[test]
    fn requested_resources_are_one_line_without_unset_fields() {
        let wanted = json!({"cpu": {"arch": null, "count": {"min": 2, "max": null}}, "memory": {"min": 16.0, "max": 16.0},
            "gpu": {"name": ["H100"], "memory": {"min": 80.0, "max": 80.0}, "count": {"min": 8, "max": 8}}, "disk": null});
        assert_eq!(format_resources(&wanted), "cpu=2.. mem=16GB gpu=H100:80GB:8");
        let small = json!({"memory": {"min": 0.097_656_25, "max": 1.5}});
        assert_eq!(format_resources(&small), "mem=100MB..1.5GB");
        let none = json!({"cpu": {"count": {"min": 1}}, "gpu": {"count": {"min": 0, "max": null}}});
        assert_eq!(format_resources(&none), "cpu=1..");
        let gpu = |mut more: serde_json::Value| {
            more["count"] = json!({"min": 1, "max": 1});
            format_resources(&json!({"gpu": more}))
        };
        assert_eq!(gpu(json!({"compute_capability": [9, 0]})), "gpu=1 compute_capability=9.0..");
        assert_eq!(gpu(json!({"total_memory": {"min": 160.0}})), "gpu=1 total_memory=160GB..");
        assert_eq!(gpu(json!({"vendor": "amd"})), "gpu=amd:1");
        assert_eq!(gpu(json!({"vendor": "nvidia", "name": ["A100"]})), "gpu=A100:1", "the name says it");
    }
}
