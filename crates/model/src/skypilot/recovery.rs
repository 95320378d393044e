//! `job_recovery`: a name, or a mapping.

use super::ParseNotes;
use crate::{
    config::{
        decode::{Ctx, Decode, Int, check_keys, closest, excerpt, is_map, optional_field, text},
        error::{Code, Diagnosis},
        quantities::parse_duration,
        yaml::{Node, Value},
    },
    managed_job::plan::{RecoveryPolicy, RecoveryStrategy},
};

/// Exit code of nodes that were killed because a sibling failed.
const SIBLING_KILLED_CODE: u8 = 137;

pub(super) const KEYS: [&str; 5] =
    ["strategy", "max_restarts_on_errors", "recover_on_exit_codes", "max_launch_tries", "max_launch_wait"];

/// Recovery policy of a file; `None` if it has none.
pub(super) type OptionalRecovery = Option<RecoveryPolicy>;

/// Decodes `job_recovery`, or its old name `spot_recovery`.
pub(super) fn field(node: &Node, cx: &mut Ctx, notes: &mut ParseNotes) -> Option<OptionalRecovery> {
    let key = if node.field("job_recovery").is_some() { "job_recovery" } else { "spot_recovery" };
    let Some(value) = node.field(key) else { return Some(None) };
    cx.under(key, |cx| decode(value, cx, notes)).map(Some)
}

pub(super) fn decode(node: &Node, cx: &mut Ctx, notes: &mut ParseNotes) -> Option<RecoveryPolicy> {
    if !is_map(node) {
        return Some(RecoveryPolicy {
            strategy: RecoveryStrategy::decode(node, cx)?,
            ..RecoveryPolicy::default()
        });
    }
    check_keys(node, &KEYS, cx);
    let strategy: Option<Option<RecoveryStrategy>> = optional_field(node, "strategy", cx, || None);
    let restarts: Option<Option<u32>> = optional_field(node, "max_restarts_on_errors", cx, || None);
    let codes: Option<Option<ExitCodes>> = optional_field(node, "recover_on_exit_codes", cx, || None);
    let tries: Option<Option<Int<1, { u32::MAX as i64 }>>> =
        optional_field(node, "max_launch_tries", cx, || None);
    let wait: Option<Option<DurationSeconds>> = optional_field(node, "max_launch_wait", cx, || None);
    let mut codes = codes?.map(|codes| codes.0).unwrap_or_default();
    if codes.contains(&SIBLING_KILLED_CODE) {
        codes.retain(|code| *code != SIBLING_KILLED_CODE);
        let message = "137 is ignored in `recover_on_exit_codes`: it marks nodes that were killed because another node failed";
        notes.warn(
            node.key_span("recover_on_exit_codes"),
            "resources.job_recovery.recover_on_exit_codes",
            message,
        );
    }
    Some(RecoveryPolicy {
        strategy: strategy?.unwrap_or(RecoveryStrategy::EagerNextRegion),
        max_restarts_on_errors: restarts?.unwrap_or(0),
        recover_on_exit_codes: codes,
        max_launch_tries: tries?.and_then(|n| u32::try_from(n.get()).ok()),
        max_launch_wait: wait?.map(|wait| wait.0),
    })
}

impl Decode for RecoveryStrategy {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let word = text(node, cx)?;
        if let Ok(strategy) = word.to_ascii_uppercase().parse() {
            return Some(strategy);
        }
        let known = Self::ALL.iter().map(|strategy| strategy.as_str());
        let message = format!("`{}` is not a strategy of `job_recovery`", excerpt(word));
        let hint = match closest(word, known.clone()) {
            Some(known) => format!("did you mean `{known}`?"),
            None => format!("use one of {}", known.collect::<Vec<_>>().join(", ")),
        };
        cx.fail(Diagnosis::new(Code::InvalidValue, node.span, message).hint(hint))
    }
}

struct ExitCodes(Vec<u8>);

impl Decode for ExitCodes {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let items = match &node.value {
            Value::Seq(items) => items.iter().collect(),
            Value::Null | Value::Scalar(_) | Value::Map(_) => vec![node],
        };
        let mut codes: Vec<u8> = Vec::new();
        for item in items {
            let n = Int::<0, 255>::decode(item, cx)?.get();
            let code = u8::try_from(n).ok()?;
            if codes.contains(&code) {
                return cx.invalid(item, format!("{code} is listed twice"));
            }
            codes.push(code);
        }
        Some(Self(codes))
    }
}

/// `90`, `30s`, `5m`, `2h`, in seconds.
pub(super) struct DurationSeconds(pub(super) i64);

impl Decode for DurationSeconds {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        match parse_duration(text(node, cx)?) {
            Ok(seconds) => Some(Self(seconds)),
            Err(reason) => cx.invalid(node, reason),
        }
    }
}
