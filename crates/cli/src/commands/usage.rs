//! `windlass usage`: GPU hours, CPU hours and cost by project, user and class over time.

use clap::ValueEnum;
use windlass_api::{
    operations::ListUsage,
    usage::{ListRequest, UsageGrouping, UsageReport, UsageRow},
};
use windlass_model::{
    config::quantities::parse_duration,
    plan::budget::day_of,
    time::{Span, Timestamp},
};

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
  windlass usage --by month --since 2026-01-01
  windlass usage --all-projects --by project,day --csv > usage.csv

Periods are whole days in UTC. What runs counts until now. A job on two of eight blocks of an instance uses a quarter of its
GPUs and pays a quarter of its price. Usage is kept when runs are deleted.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Grouping: `project`, `user`, `class`, and one of `day`, `week` and `month`; separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_value = "user", value_name = "WHAT")]
    pub(crate) by: Vec<Group>,
    /// First day of the period: `7d` ago, a date such as `2026-11-01`, or a time
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
    const fn is_period(self) -> bool {
        matches!(self, Self::Day | Self::Week | Self::Month)
    }

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

/// Longest period of a report.
const DAYS_MAX: i64 = 3_700;

/// Parses a day: an age, a date, or a time.
fn parse_day(flag: &str, text: &str) -> Result<Timestamp, CliError> {
    if let Ok(secs) = parse_duration(text) {
        return Ok(format::now() - Span::secs(secs));
    }
    Timestamp::parse(text).or_else(|_| Timestamp::parse(&format!("{text}T00:00:00Z"))).map_err(|_| {
        CliError::usage(format!("invalid `{flag}` value `{text}`: expected a day")).hint(
            "use an age such as `7d`, a date such as `2026-11-01`, or a time such as `2026-11-01T00:00:00Z`",
        )
    })
}

/// Checks the grouping and the period, which the server would refuse.
fn check_period(args: &Args, now: Timestamp) -> Result<(Timestamp, Option<Timestamp>), CliError> {
    let mut periods = args.by.iter().filter(|group| group.is_period());
    let first = periods.next();
    if let Some((first, second)) =
        first.and_then(|first| Some((first, periods.find(|other| *other != first)?)))
    {
        let name = |group: &Group| format!("{group:?}").to_lowercase();
        return Err(CliError::usage(format!(
            "`--by` contains both `{}` and `{}`, but usage is divided by one period",
            name(first),
            name(second)
        ))
        .hint("name one of `day`, `week` and `month`, for example `--by project,month`"));
    }
    let since = parse_day("--since", &args.since)?;
    let until = args.until.as_deref().map(|text| parse_day("--until", text)).transpose()?;
    let (first, last) = (day_of(since), day_of(until.unwrap_or(now).min(now)));
    if first > day_of(now) {
        return Err(CliError::usage(format!("`--since {}` is in the future", args.since)));
    }
    if first > last {
        let until = args.until.as_deref().unwrap_or_default();
        return Err(CliError::usage(format!("`--since {}` is after `--until {until}`", args.since)));
    }
    if last - first >= DAYS_MAX {
        return Err(CliError::usage(format!(
            "the period has {} days; at most {DAYS_MAX} are shown",
            last - first + 1
        ))
        .hint("use a later `--since`, or several reports"));
    }
    Ok((since, until))
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let (since, until) = check_period(args, format::now())?;
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

    use clap::Parser;

    use super::{Args, check_period, csv};

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn checked(words: &[&str]) -> Result<(Timestamp, Option<Timestamp>), String> {
        let now = Timestamp::parse("2026-11-19T12:00:00Z").unwrap();
        let line = Line::try_parse_from(["usage"].iter().chain(words)).map_err(|error| error.to_string())?;
        check_period(&line.args, now).map_err(|error| format!("{error:?}"))
    }

    #[test]
    fn a_wrong_period_or_grouping_is_refused_before_anything_is_sent() {
        for (words, want) in [
            (["--by", "day,week"], "`--by` contains both `day` and `week`"),
            (["--by", "user,color"], "invalid value 'color'"),
            (["--since", "2026-13-01"], "invalid `--since` value `2026-13-01`: expected a day"),
            (["--since", "2026-11-20"], "`--since 2026-11-20` is in the future"),
            (["--since", "2010-01-01"], "at most 3700 are shown"),
            (["--until", "soon"], "invalid `--until` value `soon`: expected a day"),
            (["--until", "2001-01-01"], "is after `--until 2001-01-01`"),
        ] {
            let error = checked(&words).unwrap_err();
            assert!(error.contains(want), "{words:?}: {error}");
        }
    }

    #[test]
    fn days_are_dates_times_or_ages() {
        let midnight = Timestamp::parse("2026-11-01T00:00:00Z").unwrap();
        assert_eq!(checked(&["--since", "2026-11-01"]), Ok((midnight, None)));
        let both =
            checked(&["--since", "2026-11-01T00:00:00Z", "--until", "2026-11-01", "--by", "user,day,day"]);
        assert_eq!(both, Ok((midnight, Some(midnight))));
        assert!(checked(&["--by", "project,user,class,month"]).is_ok());
    }

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
