//! `windlass budget`: how much the project and its members may spend in a period.

use std::collections::BTreeSet;

use clap::ValueEnum;
use windlass_api::{
    budgets::{Budget, Budgets, DeleteRequest, SetRequest},
    operations::{DeleteBudget, ListBudgets, SetBudget},
    server::EmptyRequest,
};
use windlass_model::plan::budget::BudgetUnit;

use crate::{
    cli::{Format, OutputArgs, ServerArgs},
    context,
    error::CliError,
    exit::Exit,
    output::{self, ListView, format, table::Table},
};

const EXAMPLES: &str = "\
Examples:
  windlass budget                                         list budgets and what is spent
  windlass budget set cost=500 --warn cost=400            the project may spend $500 each month
  windlass budget set gpu-hours=100 --period week --user ada
  windlass budget delete cost

Beyond a budget no job starts until the next period; `windlass why` shows it. Jobs that run go on: `max_duration` bounds them.
An event is recorded when a budget reaches its warning and when it is used up. Budgets of the project are set by global
admins, those of members by its managers.";

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
    /// List budgets
    #[command(after_help = "Examples:\n  windlass budget list -o json")]
    List,
    /// Set budgets
    #[command(after_help = "Examples:\n  windlass budget set cost=500 --warn cost=400 --period month")]
    Set {
        /// Unit and its cap: `cost` (in dollars) or `gpu-hours`
        #[arg(required_unless_present = "warn", value_name = "UNIT=CAP", value_parser = parse_amount)]
        caps: Vec<(String, f64)>,
        /// Amount from which a warning is recorded; may be repeated
        #[arg(long, value_name = "UNIT=AMOUNT", value_parser = parse_amount)]
        warn: Vec<(String, f64)>,
        /// Period, in UTC
        #[arg(long, value_enum, default_value_t = Period::Month, value_name = "PERIOD")]
        period: Period,
        /// Member whose jobs it counts; without it, all jobs of the project
        #[arg(long, value_name = "USER")]
        user: Option<String>,
    },
    /// Delete budgets
    #[command(after_help = "Examples:\n  windlass budget delete gpu-hours --period week --user ada")]
    Delete {
        /// Units
        #[arg(required = true, value_name = "UNIT")]
        units: Vec<String>,
        /// Period of the budget
        #[arg(long, value_enum, default_value_t = Period::Month, value_name = "PERIOD")]
        period: Period,
        /// Member whose budget it is
        #[arg(long, value_name = "USER")]
        user: Option<String>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Period {
    Day,
    Week,
    Month,
}

impl Period {
    fn to_wire(self) -> String {
        match self {
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
        }
        .to_owned()
    }
}

/// `cost=$500`, `gpu-hours=100`.
fn parse_amount(text: &str) -> Result<(String, f64), String> {
    let wrong =
        || format!("`{text}` is not of the form UNIT=AMOUNT, for example `cost=500` or `gpu-hours=100`");
    let (unit, amount) = text.split_once('=').ok_or_else(wrong)?;
    let unit: BudgetUnit =
        unit.parse().map_err(|_| format!("`{unit}` is not a unit; expected `cost` or `gpu-hours`"))?;
    let amount: f64 = amount.trim_start_matches('$').trim().parse().map_err(|_| wrong())?;
    if !amount.is_finite() || amount < 0.0 {
        return Err(wrong());
    }
    Ok((unit.as_str().to_owned(), amount))
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let format = args.output.format;
    context::with_context(&args.at, async |cx| {
        let mut listed = Budgets { budgets: Vec::new() };
        match &args.action {
            None | Some(Action::List) => listed = cx.call::<ListBudgets>(&EmptyRequest {}).await?,
            Some(Action::Set { caps, warn, period, user }) => {
                let amount = |of: &[(String, f64)], unit: &str| {
                    of.iter().find(|(name, _)| name == unit).map(|(_, amount)| *amount)
                };
                let units: BTreeSet<&String> = caps.iter().chain(warn).map(|(name, _)| name).collect();
                for unit in units {
                    let request = SetRequest {
                        username: user.clone(),
                        unit: unit.clone(),
                        period: period.to_wire(),
                        warn: amount(warn, unit),
                        cap: amount(caps, unit),
                    };
                    listed = cx.call::<SetBudget>(&request).await?;
                }
            }
            Some(Action::Delete { units, period, user }) => {
                for unit in units {
                    let (username, unit) = (user.clone(), unit.clone());
                    let request = DeleteRequest { username, unit, period: period.to_wire() };
                    listed = cx.call::<DeleteBudget>(&request).await?;
                }
            }
        }
        print(&cx.project, &listed.budgets, format)
    })
}

fn print(project: &str, budgets: &[Budget], format: Format) -> Result<Exit, CliError> {
    let none = "No budgets. Run `windlass budget set cost=AMOUNT` to set one.";
    let name = |budget: &Budget| match &budget.username {
        Some(user) => format!("{user}/{}/{}", budget.unit, budget.period),
        None => format!("{}/{}", budget.unit, budget.period),
    };
    ListView { project: Some(project), kind: "budgets", name, none }
        .print(budgets, format, |_| table(budgets))?;
    Ok(Exit::Done)
}

fn table(budgets: &[Budget]) -> Table {
    let mut table = Table::new(vec!["UNIT", "PERIOD", "USER", "SPENT", "WARN", "CAP", "STATE", "ENDS"]);
    for budget in budgets {
        let amount = |amount| format_amount(&budget.unit, amount);
        table.row(vec![
            budget.unit.as_str().into(),
            budget.period.as_str().into(),
            output::printable(budget.username.as_deref().unwrap_or("(all)")).into(),
            amount(budget.spent).into(),
            budget.warn.map(amount).unwrap_or_default().into(),
            budget.cap.map(amount).unwrap_or_default().into(),
            budget.state.as_str().into(),
            format::timestamp(budget.ends_at).into(),
        ]);
    }
    table
}

fn format_amount(unit: &str, amount: f64) -> String {
    if unit == "cost" { format!("${amount:.2}") } else { format!("{amount:.1}") }
}

#[cfg(test)]
mod tests {
    use super::parse_amount;

    #[test]
    fn amounts_have_a_unit() {
        for (text, want) in
            [("cost=500", ("cost", 500.0)), ("cost=$2.5", ("cost", 2.5)), ("gpu-hours=0", ("gpu-hours", 0.0))]
        {
            assert_eq!(parse_amount(text), Ok((want.0.to_owned(), want.1)), "{text}");
        }
        for wrong in ["cost", "gpu=1", "cost=", "cost=-1", "gpu-hours=inf"] {
            assert!(parse_amount(wrong).is_err(), "{wrong}");
        }
    }
}
