//! `windlass cost`: the cost of a period, from prices and durations.

use clap::ValueEnum;
use windlass_api::{
    costs::{CostGrouping, CostItem, CostReport, ListRequest},
    operations::ListCosts,
};

use super::logs::parse_since;
use crate::{
    cli::{Format, OutputArgs, ServerArgs},
    context,
    error::CliError,
    exit::Exit,
    output::{
        self, format,
        style::Colour,
        table::{Cell, Table},
    },
};

const EXAMPLES: &str = "\
Examples:
  windlass cost                                  cost of the last 30 days, by run
  windlass cost --by user --since 7d             cost of each user
  windlass cost --by fleet --since 2026-11-01T00:00:00Z --until 2026-12-01T00:00:00Z
  windlass cost -o json | jq .total.cost

The cost by run or user is that of the blocks that jobs held: a job on two of eight blocks pays a quarter of the
instance. The cost by fleet is that of its instances for as long as they existed, including idle time.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Grouping of the costs
    #[arg(long, value_enum, default_value_t = Group::Run, value_name = "WHAT")]
    pub(crate) by: Group,
    /// Start of the period: `7d` ago, or a time such as `2026-11-01T00:00:00Z`
    #[arg(long, value_name = "WHEN", default_value = "30d")]
    pub(crate) since: String,
    /// End of the period; defaults to now
    #[arg(long, value_name = "WHEN")]
    pub(crate) until: Option<String>,
    /// Number of rows, most expensive first; the total includes all
    #[arg(short = 'n', long, value_name = "N", default_value_t = 100,
          value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) last: u16,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Group {
    Run,
    User,
    Fleet,
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let request = ListRequest {
        by: match args.by {
            Group::Run => CostGrouping::Run,
            Group::User => CostGrouping::User,
            Group::Fleet => CostGrouping::Fleet,
        },
        since: Some(parse_since(&args.since)?),
        until: args.until.as_deref().map(parse_since).transpose()?,
        every: None,
        limit: args.last.into(),
    };
    if request.until.is_some_and(|until| request.since > Some(until)) {
        return Err(
            CliError::usage("the period ends before it begins").hint("`--since` must be before `--until`")
        );
    }
    context::with_context(&args.at, async |cx| {
        let listing = cx.call::<ListCosts>(&request).await?;
        match args.output.format {
            Format::Json | Format::Yaml => output::print_one(args.output.format, &listing, "", |_| {})?,
            Format::Jsonl => output::print_jsonl(&listing.items)?,
            Format::Name => {
                listing.items.iter().for_each(|item| output::print_data(&output::printable(&item.name)))
            }
            Format::Table | Format::Wide if listing.items.is_empty() => {
                output::print_message("No usage in this period.");
            }
            Format::Table | Format::Wide => table(&listing, args).print(),
        }
        Ok(Exit::Done)
    })
}

fn table(listing: &CostReport, args: &Args) -> Table {
    let wide = args.output.format == Format::Wide;
    let (first, count) = match args.by {
        Group::Run => ("RUN", "SUBMISSIONS"),
        Group::User => ("USER", "SUBMISSIONS"),
        Group::Fleet => ("FLEET", "INSTANCES"),
    };
    let mut head = vec![first, "HOURS", "COST"];
    if args.by == Group::Run {
        head.insert(1, "USER");
    }
    if wide {
        head.extend([count, "ID"]);
    }
    let mut table = Table::new(head);
    let row = |item: &CostItem| {
        let mut row: Vec<Cell> =
            vec![item.name.as_str().into(), format_hours(item.hours).into(), format_money(item.cost).into()];
        if args.by == Group::Run {
            row.insert(1, item.user.clone().unwrap_or_default().into());
        }
        if wide {
            row.extend([item.count.to_string().into(), item.id.to_string().into()]);
        }
        row
    };
    listing.items.iter().for_each(|item| table.row(row(item)));
    let bold = |text: String| Cell::coloured(text, Colour::Bold);
    let mut total = vec![
        bold("total".to_owned()),
        bold(format_hours(listing.total.hours)),
        bold(format_money(listing.total.cost)),
    ];
    if args.by == Group::Run {
        total.insert(1, "".into());
    }
    if wide {
        total.extend([bold(listing.total.count.to_string()), "".into()]);
    }
    table.row(total);
    table
}

fn format_hours(hours: f64) -> String {
    format!("{hours:.2}")
}

/// Rounds to cents; amounts below one cent keep their digits.
fn format_money(dollars: f64) -> String {
    if dollars == 0.0 || dollars >= 0.01 { format!("${dollars:.2}") } else { format::price(dollars) }
}

#[cfg(test)]
mod tests {
    use super::format_money;

    #[test]
    fn costs_are_rounded_to_cents_and_tiny_costs_keep_their_digits() {
        assert_eq!(
            [format_money(0.0), format_money(12.3456), format_money(0.0004)],
            ["$0.00", "$12.35", "$0.0004"]
        );
    }
}
