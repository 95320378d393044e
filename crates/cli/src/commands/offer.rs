//! `windlass offer`: offers that match the requirements, with prices, and why others do not match.

use serde::Serialize;
use serde_json::{Value, json};
use windlass_api::{
    Document, gpus,
    offers::Offer,
    operations::{ListGpus, PlanRun},
    runs::{JobPlan, PlanRequest},
};
use windlass_model::config::{Configuration, error};

use super::{apply::format_refusals, resource_flags::ResourceArgs};
use crate::{
    cli::{Format, OutputArgs, ServerArgs},
    context::{self, Context},
    error::CliError,
    exit::Exit,
    output::{
        self, ListView, format,
        style::Colour,
        table::{Cell, Table},
    },
};

/// Maximum number of locations listed when nothing fits.
const REFUSALS_MAX: usize = 10;

const EXAMPLES: &str = "\
Examples:
  windlass offer                                    all offers that are available now
  windlass offer --gpu H100:1.. --max-price 4       at least one GPU, for at most $4 per hour
  windlass offer --gpu 24GB --spot -b aws -r eu-west-1
  windlass offer --group-by gpu,backend             one line for each GPU and backend
  windlass offer --fleet rack -R                    free instances of a fleet

If nothing fits, each candidate is listed with the reasons why it does not fit.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) requirements: ResourceArgs,
    /// Group offers by GPU: `gpu`, optionally with `backend`, `region` (of a backend) and `count`
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    pub(crate) group_by: Vec<String>,
    /// Maximum number of offers
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) max_offers: u16,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let spec = build_run_spec(&args.requirements)?;
    let by = parse_group_by(&args.group_by)?;
    context::with_context(&args.at, async |cx| match by {
        Some(by) => show_groups(cx, args, spec.clone(), by.clone()).await,
        None => show_offers(cx, args, spec.clone()).await,
    })
}

/// Builds a task with only the requirements of the flags. Reports all invalid flags.
fn build_run_spec(requirements: &ResourceArgs) -> Result<Document, CliError> {
    let mut configuration = json!({
        "type": "task", "image": "scratch", "user": "root", "commands": [":"],
        "resources": { "cpu": "1..", "memory": "0..", "gpu": "0..", "disk": null },
    });
    requirements.write_to(&mut configuration);
    let configuration = Configuration::from_json(&configuration).map_err(|problems| {
        CliError::usage("invalid requirements")
            .why(error::summary(&problems))
            .hint("run `windlass offer --help` for the syntax")
    })?;
    let spec = json!({ "run_name": null, "configuration": configuration, "profile": { "name": "default" } });
    Document::new(&spec).map_err(|error| CliError::from_error("failed to encode the request", &error))
}

/// Validates the grouping, which must include `gpu`.
fn parse_group_by(words: &[String]) -> Result<Option<Vec<String>>, CliError> {
    if words.is_empty() {
        return Ok(None);
    }
    let known = ["gpu", "backend", "region", "count"];
    if let Some(wrong) = words.iter().find(|word| !known.contains(&word.as_str())) {
        return Err(CliError::usage(format!("invalid `--group-by` value `{wrong}`"))
            .hint("use `gpu`, `backend`, `region` and `count`"));
    }
    let has = |word: &str| words.iter().any(|other| other == word);
    if !has("gpu") {
        return Err(CliError::usage("`--group-by` requires `gpu`").hint("use `--group-by gpu,backend`"));
    }
    if has("region") && !has("backend") {
        return Err(CliError::usage("`--group-by region` requires `backend`")
            .hint("use `--group-by gpu,backend,region`"));
    }
    Ok(Some(words.iter().filter(|word| *word != "gpu").cloned().collect()))
}

#[derive(Serialize)]
struct OfferDocument<'a> {
    project: &'a str,
    user: &'a str,
    requirements: Value,
    offers: &'a [Offer],
    total_offers: i64,
    /// Reasons why nothing could start immediately, if so.
    why: Option<Value>,
}

async fn show_offers(cx: &Context, args: &Args, run_spec: Document) -> Result<Exit, CliError> {
    let request = PlanRequest {
        run_spec,
        max_offers: Some(args.max_offers.into()),
        full_offers: false,
        unallocated_resources: false,
        reverse_offers: false,
        for_offers_only: true,
    };
    let plan = cx.call::<PlanRun>(&request).await?;
    let none = || CliError::new("invalid response from the server").why("it has no job plan");
    let job: &JobPlan = plan.job_plans.first().ok_or_else(none)?;
    let why = job.why.as_ref().and_then(|why| why.value().ok());
    match args.output.format {
        Format::Json | Format::Yaml => {
            let spec = job.job_spec.value().unwrap_or_default();
            let answer = OfferDocument {
                project: &plan.project_name,
                user: &plan.user,
                requirements: spec["requirements"].clone(),
                offers: &job.offers,
                total_offers: job.total_offers,
                why,
            };
            output::print_one(args.output.format, &answer, "", |_| {})?;
        }
        Format::Jsonl => output::print_jsonl(&job.offers)?,
        Format::Name => {
            let mut names: Vec<&str> = job.offers.iter().map(|offer| offer.instance.name.as_str()).collect();
            names.dedup();
            names.iter().for_each(|name| output::print_data(&output::printable(name)));
        }
        Format::Table | Format::Wide => {
            if !job.offers.is_empty() {
                let table = table(&job.offers, args.output.format == Format::Wide);
                if args.output.format == Format::Wide { table.whole().print() } else { table.print() }
            }
            print_notes(job, why.as_ref());
        }
    }
    Ok(Exit::Done)
}

/// Prints the total number of offers, and why nothing could start immediately.
fn print_notes(job: &JobPlan, why: Option<&Value>) {
    let (shown, total) = (job.offers.len(), usize::try_from(job.total_offers).unwrap_or(usize::MAX));
    if shown < total {
        output::print_message(&format!(
            "Showing {shown} of {}. Use `--max-offers N` to show more.",
            format::count(total, "offer")
        ));
    }
    let lines = why.map(|why| format_refusals(why, REFUSALS_MAX)).unwrap_or_default();
    if job.offers.is_empty() {
        output::print_message("Nothing fits now.");
    } else if !lines.is_empty() {
        output::print_message("A job cannot start on any of these offers immediately.");
    }
    lines.iter().for_each(|line| output::print_message(&output::printable(&format!("  {line}"))));
    if job.offers.is_empty() && lines.is_empty() {
        output::print_message("  hint: jobs run in existing fleets; run `windlass fleet` to list them");
    }
}

/// Colours available offers green.
fn format_availability(word: &str) -> Cell {
    let colour = match word {
        "idle" | "available" => Colour::Green,
        "busy" => Colour::Yellow,
        _ => Colour::Dim,
    };
    Cell::coloured(word.replace('_', " "), colour)
}

fn table(offers: &[Offer], wide: bool) -> Table {
    let mut head = vec!["#", "BACKEND", "RESOURCES", "INSTANCE TYPE", "PRICE", "AVAILABILITY"];
    if wide {
        head.extend(["REGION", "BLOCKS"]);
    }
    let mut table = Table::new(head);
    for (number, offer) in (1..).zip(offers) {
        let resources = serde_json::to_value(&offer.instance.resources).unwrap_or_default();
        let number: u32 = number;
        let mut row = vec![
            number.to_string().into(),
            format::backend(offer.backend.as_str(), &offer.region).into(),
            format::resources(&resources).into(),
            offer.instance.name.as_str().into(),
            format::price(offer.price).into(),
            format_availability(&offer.availability),
        ];
        if wide {
            row.extend([
                offer.region.as_str().into(),
                format!("{}/{}", offer.blocks, offer.total_blocks).into(),
            ]);
        }
        table.row(row);
    }
    table
}

async fn show_groups(
    cx: &Context,
    args: &Args,
    run_spec: Document,
    by: Vec<String>,
) -> Result<Exit, CliError> {
    let request = gpus::ListRequest {
        run_spec,
        group_by: Some(by.clone()),
        full_offers: false,
        unallocated_resources: false,
        reverse: false,
    };
    let mut gpus = cx.call::<ListGpus>(&request).await?.gpus;
    gpus.truncate(args.max_offers.into());
    let name = |gpu: &Value| gpu["name"].as_str().unwrap_or("?").to_owned();
    let none = "No GPU fits. Run `windlass offer` with the same flags to see why.";
    ListView { project: Some(&cx.project), kind: "gpus", name, none }.print(
        &gpus,
        args.output.format,
        |wide| gpu_table(&gpus, wide || by.iter().any(|word| word == "region")),
    )?;
    Ok(Exit::Done)
}

/// Formats a single value or a list.
fn format_words(value: &Value, one: &str, many: &str) -> String {
    let list = |value: &Value| -> Vec<String> {
        value
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .map(|word| word.replace('_', " "))
            .collect()
    };
    value[one].as_str().map_or_else(|| list(&value[many]).join(", "), str::to_owned)
}

/// SSH hosts and local machines are distinguished by their region, if there is only one.
fn format_backends(gpu: &Value) -> String {
    let region = format_words(gpu, "region", "regions");
    let names = format_words(gpu, "backend", "backends");
    names.split(", ").map(|name| format::backend(name, &region)).collect::<Vec<_>>().join(", ")
}

fn format_range(value: &Value, show: impl Fn(f64) -> String) -> String {
    match (value["min"].as_f64(), value["max"].as_f64()) {
        (Some(min), Some(max)) if min < max => format!("{}..{}", show(min), show(max)),
        (Some(min), _) => show(min),
        (None, _) => String::new(),
    }
}

fn gpu_table(gpus: &[Value], regions: bool) -> Table {
    let mut head = vec!["#", "GPU", "SPOT", "$/GPU", "BACKEND", "AVAILABILITY"];
    if regions {
        head.insert(5, "REGION");
    }
    let mut table = Table::new(head);
    for (number, gpu) in (1..).zip(gpus) {
        let number: u32 = number;
        let memory = gpu["memory_mib"].as_i64().unwrap_or(0) / 1024;
        let name = gpu["name"].as_str().unwrap_or("?");
        let count = format_range(&gpu["count"], |count| count.to_string());
        let mut row: Vec<Cell> = vec![
            number.to_string().into(),
            format!("{name}:{memory}GB:{count}").into(),
            format_words(gpu, "", "spot").into(),
            format_range(&gpu["price"], format::price).into(),
            format_backends(gpu).into(),
            format_words(gpu, "", "availability").into(),
        ];
        if regions {
            row.insert(5, format_words(gpu, "region", "regions").into());
        }
        table.row(row);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::{ResourceArgs, build_run_spec, gpu_table, parse_group_by};
    use crate::output::style::Style;
    use serde_json::json;

    #[test]
    fn invalid_resource_flags_are_refused_by_the_client() {
        let requirements = ResourceArgs {
            gpu: Some("H100:80GB:2..".to_owned()),
            max_price: Some(3.5),
            ..ResourceArgs::default()
        };
        let sent = build_run_spec(&requirements).unwrap().value().unwrap();
        assert_eq!(sent["configuration"]["resources"]["gpu"]["name"], json!(["H100"]));
        assert_eq!(sent["configuration"]["max_price"], 3.5);
        let wrong = ResourceArgs { memory: Some("lots".to_owned()), ..ResourceArgs::default() };
        let text = build_run_spec(&wrong).unwrap_err().text();
        assert!(text.contains("memory"), "{text}");
        let nowhere = ResourceArgs { backend: vec!["moon".to_owned()], ..ResourceArgs::default() };
        assert!(build_run_spec(&nowhere).is_err());
    }

    #[test]
    fn group_by_accepts_only_valid_gpu_groupings() {
        let words = |text: &str| -> Vec<String> { text.split(',').map(str::to_owned).collect() };
        assert_eq!(parse_group_by(&words("gpu,backend")).unwrap(), Some(words("backend")));
        assert_eq!(parse_group_by(&[]).unwrap(), None);
        for wrong in ["backend", "gpu,region", "gpu,colour"] {
            assert!(parse_group_by(&words(wrong)).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_gpu_group_is_printed_on_one_line() {
        let gpu = json!({ "name": "H100", "memory_mib": 81920, "spot": ["on-demand", "spot"], "backends": ["aws", "gcp"],
            "count": { "min": 1, "max": 8 }, "price": { "min": 2.5, "max": 4.0 }, "availability": ["available", "no_quota"] });
        let lines = gpu_table(&[gpu], false).lines(Style::plain());
        assert_eq!(lines[1], "1  H100:80GB:1..8  on-demand, spot  $2.5..$4  aws, gcp  available, no quota");
    }
}
