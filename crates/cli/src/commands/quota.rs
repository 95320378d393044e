//! `windlass quota`: how much the project and its members may hold at once, and how much is guaranteed to the project.

use std::collections::BTreeSet;

use windlass_api::{
    operations::{DeleteQuota, ListQuotas, SetQuota},
    quotas::{DeleteRequest, Quota, Quotas, SetRequest},
    server::EmptyRequest,
};
use windlass_model::plan::quota::QuotaResource;

use crate::{
    cli::{Format, OutputArgs, ServerArgs},
    context,
    error::CliError,
    exit::Exit,
    output::{self, ListView, table::Table},
};

const EXAMPLES: &str = "\
Examples:
  windlass quota                                 list quotas and their use
  windlass quota set gpu=8 cpu=64                the project may hold 8 GPUs and 64 CPUs
  windlass quota set gpu:H100=2 --user ada       ada may hold 2 of the H100
  windlass quota set memory=512GB price=20       512 GB of memory, and 20 dollars per hour
  windlass quota set gpu=8 --share gpu=4         4 GPUs are guaranteed, and up to 8 may be held
  windlass quota delete gpu

A job over a quota waits until others end. A project that holds less than its share comes before projects that hold more
than theirs. Quotas of the project are set by global admins, those of members by its managers.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) action: Option<Action>,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// List quotas
    #[command(after_help = "Examples:\n  windlass quota list -o json")]
    List,
    /// Set quotas
    #[command(after_help = "Examples:\n  windlass quota set gpu=8 memory=512GB --user ada")]
    Set {
        /// Resource and its maximum: `gpu`, `gpu:NAME`, `cpu`, `memory` (in GB), `price` (in dollars per hour)
        #[arg(required_unless_present = "share", value_name = "RESOURCE=MAX", value_parser = parse_limit)]
        limits: Vec<(String, f64)>,
        /// Amount of a resource that is guaranteed to the project; may be repeated
        #[arg(long, value_name = "RESOURCE=AMOUNT", value_parser = parse_limit, conflicts_with = "user")]
        share: Vec<(String, f64)>,
        /// Member whose jobs it limits; without it, all jobs of the project
        #[arg(long, value_name = "USER")]
        user: Option<String>,
    },
    /// Delete quotas
    #[command(after_help = "Examples:\n  windlass quota delete gpu --user ada")]
    Delete {
        /// Resources
        #[arg(required = true, value_name = "RESOURCE")]
        resources: Vec<String>,
        /// Member whose quota it is
        #[arg(long, value_name = "USER")]
        user: Option<String>,
    },
}

/// `gpu=8`, `memory=512GB`, `price=$20`.
fn parse_limit(text: &str) -> Result<(String, f64), String> {
    let wrong = || format!("`{text}` is not of the form RESOURCE=MAX, for example `gpu=8` or `memory=512GB`");
    let (resource, max) = text.split_once('=').ok_or_else(wrong)?;
    let known = QuotaResource::try_from(resource.to_owned())?;
    let (number, factor) = match known {
        QuotaResource::Memory => {
            match (max.strip_suffix("TB"), max.strip_suffix("GB"), max.strip_suffix("MB")) {
                (Some(number), ..) => (number, 1024.0),
                (_, Some(number), _) => (number, 1.0),
                (.., Some(number)) => (number, 1.0 / 1024.0),
                (None, None, None) => (max, 1.0),
            }
        }
        QuotaResource::Price => (max.trim_start_matches('$'), 1.0),
        QuotaResource::Gpus | QuotaResource::GpusNamed(_) | QuotaResource::Cpus => (max, 1.0),
    };
    let number: f64 = number.trim().parse().map_err(|_| wrong())?;
    if !number.is_finite() || number < 0.0 {
        return Err(wrong());
    }
    Ok((resource.to_owned(), number * factor))
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let format = args.output.format;
    context::with_context(&args.at, async |cx| {
        let mut listed = Quotas { quotas: Vec::new() };
        match &args.action {
            None | Some(Action::List) => listed = cx.call::<ListQuotas>(&EmptyRequest {}).await?,
            Some(Action::Set { limits, share, user }) => {
                let amount = |of: &[(String, f64)], resource: &str| {
                    of.iter().find(|(name, _)| name == resource).map(|(_, amount)| *amount)
                };
                let resources: BTreeSet<&String> = limits.iter().chain(share).map(|(name, _)| name).collect();
                for resource in resources {
                    let request = SetRequest {
                        username: user.clone(),
                        resource: resource.clone(),
                        max: amount(limits, resource),
                        share: amount(share, resource),
                    };
                    listed = cx.call::<SetQuota>(&request).await?;
                }
            }
            Some(Action::Delete { resources, user }) => {
                for resource in resources {
                    let request = DeleteRequest { username: user.clone(), resource: resource.clone() };
                    listed = cx.call::<DeleteQuota>(&request).await?;
                }
            }
        }
        print(&cx.project, &listed.quotas, format)
    })
}

fn print(project: &str, quotas: &[Quota], format: Format) -> Result<Exit, CliError> {
    let none = "No quotas. Run `windlass quota set RESOURCE=MAX` to set one.";
    let name = |quota: &Quota| match &quota.username {
        Some(user) => format!("{user}/{}", quota.resource),
        None => quota.resource.clone(),
    };
    ListView { project: Some(project), kind: "quotas", name, none }
        .print(quotas, format, |_| table(quotas))?;
    Ok(Exit::Done)
}

fn table(quotas: &[Quota]) -> Table {
    let mut table = Table::new(vec!["RESOURCE", "USER", "USED", "SHARE", "MAX"]);
    for quota in quotas {
        let user = quota.username.as_deref().unwrap_or("(all)");
        let amount = |amount| format_amount(&quota.resource, amount);
        table.row(vec![
            quota.resource.as_str().into(),
            output::printable(user).into(),
            amount(quota.used).into(),
            quota.share.map(amount).unwrap_or_default().into(),
            quota.max.map(amount).unwrap_or_default().into(),
        ]);
    }
    table
}

fn format_amount(resource: &str, amount: f64) -> String {
    match resource {
        "memory" => format!("{}GB", (amount * 10.0).round() / 10.0),
        "price" => format!("${}/h", (amount * 10_000.0).round() / 10_000.0),
        _ => amount.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::parse_limit;

    #[test]
    fn limits_have_a_resource_and_an_amount_with_its_unit() {
        for (text, want) in [
            ("gpu=8", ("gpu", 8.0)),
            ("gpu:H100=0", ("gpu:H100", 0.0)),
            ("memory=512GB", ("memory", 512.0)),
            ("memory=2TB", ("memory", 2048.0)),
            ("memory=512MB", ("memory", 0.5)),
            ("price=$1.5", ("price", 1.5)),
        ] {
            assert_eq!(parse_limit(text), Ok((want.0.to_owned(), want.1)), "{text}");
        }
        for wrong in ["gpu", "=1", "gpu=", "gpu=-1", "gpu=x", "gpu=inf"] {
            assert!(parse_limit(wrong).is_err(), "{wrong}");
        }
    }
}
