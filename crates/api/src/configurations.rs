//! Checks and plans of the text of a configuration, for editors in a browser.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    Document,
    explanations::Refusal,
    offers::Offer,
    runs::{ApplyAction, ExpectedRun},
};

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CheckRequest {
    /// Text of a configuration or of a task file.
    pub text: String,
}

/// One problem of a text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ConfigurationProblem {
    pub code: String,
    /// `error` or `warning`.
    pub severity: String,
    pub message: String,
    /// Lines and columns start at 1; the end is not included.
    pub line: u32,
    pub column: u32,
    pub end_line: u32,
    pub end_column: u32,
    pub hint: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CheckResult {
    pub problems: Vec<ConfigurationProblem>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PlanTextRequest {
    /// Text of a configuration or of a task file.
    pub text: String,
    /// Variables that the text leaves open.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
}

/// Effect of applying a text.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ConfigurationPlan {
    /// `task`, `service`, `dev-environment`, or `managed-job` for a task file.
    pub r#type: String,
    /// Empty if the server chooses it.
    pub name: String,
    pub action: ApplyAction,
    /// For `runs/apply`; empty for a managed job, which is launched from its text.
    pub run_spec: Document,
    /// The active run of this name, for `runs/apply`.
    pub current_resource: Option<ExpectedRun>,
    pub offers: Vec<Offer>,
    pub total_offers: i64,
    pub max_price: Option<f64>,
    pub starts_now: bool,
    pub refusals: Vec<Refusal>,
    pub left_out: u32,
    /// Environments that the jobs run in, in words.
    pub runs_in: Vec<String>,
    /// Configuration of the active run, as YAML.
    pub current_text: Option<String>,
    /// Configuration with its defaults, as YAML.
    pub effective_text: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PlanTextResult {
    pub problems: Vec<ConfigurationProblem>,
    /// Null if the text has errors.
    pub plan: Option<ConfigurationPlan>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct SchemaRequest {
    /// `windlass` or `profiles`.
    pub name: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ErrorPageRequest {
    /// Such as `C011`.
    pub code: String,
}

/// Page about an error code.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ErrorPage {
    pub code: String,
    pub title: String,
    /// Markdown.
    pub text: String,
}
