//! `windlass usage`: GPU hours, CPU hours and cost by project, user and class over time.

use clap::ValueEnum;
use windlass_api::{
    operations::ListUsage,
    usage::{ListRequest, UsageGrouping, UsageReport, UsageRow},
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
  windlass usage                                   usage of the project in the last 30 days, by user
  windlass usage --by user,class --since 7d        by user and class
  windlass usage --by month --since 2026-01-01T00:00:00Z
  windlass usage --all-projects --by project,day --csv > usage.csv

Periods are whole days in UTC. What runs counts until now. A job on two of eight blocks of an instance uses a quarter of its
GPUs and pays a quarter of its price. Usage is kept when runs are deleted.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Grouping: `project`, `user`, `class`, and one of `day`, `week` and `month`; separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_value = "user", value_name = "WHAT")]
    pub(crate) by: Vec<Group>,
    /// First day of the period: `7d` ago, or a time such as `2026-11-01T00:00:00Z`
    #[arg(long, value_name = "WHEN", default_value = "29d")]
    pub(crate) since: String,
    /// Last day of the period; defaults to today
    #[arg(long, value_name = "WHEN")]
    pub(crate) until: Option<String>,
    /// Include all projects that you may see
    #[arg(long)]
    pub(crate) all_projects: bool,
    /// Print comma-separated values with a header
    #[arg(long, conflicts_with = "format")]
    pub(crate) csv: bool,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Group {
    Project,
    User,
    Class,
    Day,
    Week,
    Month,
}

impl Group {
    const fn to_wire(self) -> UsageGrouping {
        match self {
            Self::Project => UsageGrouping::Project,
            Self::User => UsageGrouping::User,
            Self::Class => UsageGrouping::Class,
            Self::Day => UsageGrouping::Day,
            Self::Week => UsageGrouping::Week,
            Self::Month => UsageGrouping::Month,
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let (since, until) = (parse_since(&args.since)?, args.until.as_deref().map(parse_since).transpose()?);
    context::with_context(&args.at, async |cx| {
        let request = ListRequest {
            projects: if args.all_projects { Vec::new() } else { vec![cx.project.clone()] },
            by: args.by.iter().map(|group| group.to_wire()).collect(),
            since: Some(since),
            until,
        };
        let report = cx.call::<ListUsage>(&request).await?;
        match args.output.format {
            _ if args.csv => csv(&report).iter().for_each(|line| output::print_data(line)),
            Format::Json | Format::Yaml => output::print_one(args.output.format, &report, "", |_| {})?,
            Format::Jsonl => output::print_jsonl(&report.rows)?,
            Format::Name => {
                report.rows.iter().for_each(|row| output::print_data(&output::printable(&format_group(row))));
            }
            Format::Table | Format::Wide if report.rows.is_empty() => {
                output::print_message("No usage in this period.");
            }
            Format::Table | Format::Wide => table(&report, args).print(),
        }
        Ok(Exit::Done)
    })
}

/// Values of the fields by which a row is grouped.
fn group_fields(row: &UsageRow) -> [Option<String>; 4] {
    // Periods begin at midnight.
    let from = row.from.map(|from| format::timestamp(from).chars().take(10).collect());
    [from, row.project.clone(), row.user.clone(), row.class.clone()]
}

fn format_group(row: &UsageRow) -> String {
    group_fields(row).into_iter().flatten().collect::<Vec<_>>().join("/")
}

fn table(report: &UsageReport, args: &Args) -> Table {
    let has = |groups: &[Group]| args.by.iter().any(|group| groups.contains(group));
    let columns = [
        ("FROM", has(&[Group::Day, Group::Week, Group::Month])),
        ("PROJECT", has(&[Group::Project])),
        ("USER", has(&[Group::User])),
        ("CLASS", has(&[Group::Class])),
    ];
    let mut head: Vec<&'static str> =
        columns.iter().filter(|(_, shown)| *shown).map(|(name, _)| *name).collect();
    head.extend(["JOBS", "GPU HOURS", "CPU HOURS", "COST"]);
    let mut table = Table::new(head);
    let row = |row: &UsageRow, is_total: bool| -> Vec<Cell> {
        let cell = |text: String| if is_total { Cell::coloured(text, Colour::Bold) } else { text.into() };
        let fields = group_fields(row).into_iter().zip(columns).filter(|(_, (_, shown))| *shown);
        let mut cells: Vec<Cell> =
            fields.map(|(field, _)| cell(output::printable(&field.unwrap_or_default()))).collect();
        if let Some(first) = cells.first_mut().filter(|_| is_total) {
            *first = cell("total".to_owned());
        }
        let amounts = [
            row.jobs.to_string(),
            format!("{:.2}", row.gpu_hours),
            format!("{:.2}", row.cpu_hours),
            format!("${:.2}", row.cost),
        ];
        cells.extend(amounts.map(cell));
        cells
    };
    report.rows.iter().for_each(|one| table.row(row(one, false)));
    table.row(row(&report.total, true));
    table
}

/// Lines as in RFC 4180.
fn csv(report: &UsageReport) -> Vec<String> {
    let mut lines = vec!["from,project,user,class,jobs,gpu_hours,cpu_hours,cost".to_owned()];
    for row in &report.rows {
        let fields = group_fields(row).map(|field| quote(&field.unwrap_or_default()));
        let UsageRow { jobs, gpu_hours, cpu_hours, cost, .. } = row;
        lines.push(format!("{},{jobs},{gpu_hours:.6},{cpu_hours:.6},{cost:.6}", fields.join(",")));
    }
    lines
}

/// Quotes a field if it needs that; a spreadsheet must not take a name for a formula.
fn quote(field: &str) -> String {
    let field = match field.chars().next() {
        Some('=' | '+' | '-' | '@') => format!("'{field}"),
        Some(_) | None => field.to_owned(),
    };
    if field.contains([',', '"', '\n', '\r']) { format!("\"{}\"", field.replace('"', "\"\"")) } else { field }
}

#[cfg(test)]
mod tests {
    use windlass_api::usage::{UsageReport, UsageRow};
    use windlass_model::time::Timestamp;

    use super::csv;

    #[test]
    fn csv_has_a_header_and_quotes_fields_that_need_it() {
        let row = UsageRow {
            from: Some(Timestamp::parse("2026-11-01T00:00:00Z").unwrap()),
            project: Some("a,\"b\"".into()),
            user: Some("=ada".into()),
            class: None,
            jobs: 2,
            gpu_hours: 1.5,
            cpu_hours: 12.0,
            cost: 0.25,
        };
        let (since, until) = (Timestamp(0), Timestamp(0));
        let report = UsageReport { since, until, rows: vec![row], total: UsageRow::default() };
        assert_eq!(
            csv(&report),
            [
                "from,project,user,class,jobs,gpu_hours,cpu_hours,cost",
                "2026-11-01,\"a,\"\"b\"\"\",'=ada,,2,1.500000,12.000000,0.250000",
            ]
        );
    }
}
