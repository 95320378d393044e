//! Formats times, prices and resources for people.

use serde_json::Value;
use windlass_model::{
    money::Price,
    time::{Span, Timestamp},
};

/// Current time of this machine's clock: only for texts such as "3 minutes ago".
#[expect(clippy::disallowed_methods, reason = "the one clock of the command line; nothing is decided by it")]
pub(crate) fn now() -> Timestamp {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    Timestamp(i64::try_from(since.as_micros()).unwrap_or(i64::MAX))
}

/// `5 s`, `3 min`, `2 h`, `4 d`.
pub(crate) fn span(span: Span) -> String {
    let secs = span.as_secs().max(0);
    match secs {
        0..60 => format!("{secs} s"),
        60..3600 => format!("{} min", secs / 60),
        3600..172_800 => format!("{} h", secs / 3600),
        _ => format!("{} d", secs / 86_400),
    }
}

pub(crate) fn ago(time: Timestamp, now: Timestamp) -> String {
    if now.since(time).as_secs() < 1 { "now".to_owned() } else { format!("{} ago", span(now.since(time))) }
}

/// `2026-11-20T09:00:01Z`: a time to the second.
pub(crate) fn timestamp(time: Timestamp) -> String {
    Timestamp::from_secs(time.0.div_euclid(1_000_000)).to_string()
}

/// `512 B`, `1.5 MB`: in decimal units, as downloads are counted.
pub(crate) fn bytes(count: u64) -> String {
    let units = [(1_000_000_000_000, "TB"), (1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB")];
    for (size, unit) in units {
        if count >= size {
            let tenths = count / (size / 10);
            return match tenths % 10 {
                0 => format!("{} {unit}", tenths / 10),
                rest => format!("{}.{rest} {unit}", tenths / 10),
            };
        }
    }
    format!("{count} B")
}

/// `$1.25`, with up to four digits; free is `$0`, and `unknown` if the backend does not know it.
pub(crate) fn price(dollars: f64) -> String {
    if !Price::from_dollars(dollars).is_known() {
        return "unknown".to_owned();
    }
    let text = format!("{dollars:.4}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    format!("${text}")
}

/// The API uses one backend name for local machines and SSH hosts; their region distinguishes them.
pub(crate) fn backend<'a>(name: &'a str, region: &str) -> &'a str {
    match (name, region) {
        ("remote", "local") => "local",
        ("remote", "remote" | "") => "ssh",
        ("remote", _) => "own",
        _ => name,
    }
}

/// `cpu=x86:26 mem=224GB disk=800GB gpu=H100:80GB:1` for the `resources` of an instance type.
pub(crate) fn resources(value: &Value) -> String {
    let mut parts = Vec::new();
    if let Some(cpus) = value["cpus"].as_i64() {
        let arch = value["cpu_arch"].as_str().map(|arch| format!("{arch}:")).unwrap_or_default();
        parts.push(format!("cpu={arch}{cpus}"));
    }
    if let Some(memory) = value["memory_mib"].as_i64() {
        parts.push(format!("mem={}", gigabytes(memory)));
    }
    if let Some(disk) = value["disk"]["size_mib"].as_i64().filter(|size| *size > 0) {
        parts.push(format!("disk={}", gigabytes(disk)));
    }
    if let Some(gpu) = gpu(value) {
        parts.push(gpu);
    }
    if value["spot"].as_bool() == Some(true) {
        parts.push("(spot)".to_owned());
    }
    parts.join(" ")
}

/// `gpu=H100:80GB:8`; `None` without GPUs.
pub(crate) fn gpu(resources: &Value) -> Option<String> {
    let gpus = resources["gpus"].as_array()?;
    let first = gpus.first()?;
    let name = first["name"].as_str().unwrap_or("?");
    let memory = gigabytes(first["memory_mib"].as_i64().unwrap_or(0));
    Some(format!("gpu={name}:{memory}:{}", gpus.len()))
}

fn gigabytes(mib: i64) -> String {
    if mib % 1024 == 0 {
        return format!("{}GB", mib / 1024);
    }
    #[expect(clippy::cast_precision_loss, reason = "sizes of machines, shown with one digit")]
    let gb = mib as f64 / 1024.0;
    format!("{gb:.1}GB")
}

/// `16GB`, `1.5GB`, `100MB` for a size in gibibytes, in the notation of configurations as far as possible.
pub(crate) fn size(gibibytes: f64) -> String {
    let mib = gibibytes * 1024.0;
    if gibibytes < 1.0 && mib.fract() == 0.0 && mib > 0.0 {
        return format!("{mib}MB");
    }
    let hundredths = (gibibytes * 100.0).round() / 100.0;
    if mib.fract() == 0.0 && hundredths != gibibytes {
        return format!("{mib}MB");
    }
    format!("{hundredths}GB")
}

/// Longer messages are sentences.
const STATUS_MAX: usize = 24;

/// Splits a status into a short form and an optional sentence, which tables show in a separate column.
pub(crate) fn split_status<'a>(status: &'a str, message: &'a str) -> (&'a str, &'a str) {
    let is_short =
        message.chars().count() <= STATUS_MAX && message.split(' ').count() <= 3 && !message.contains(':');
    match message {
        "" => (status, ""),
        text if is_short => (text, ""),
        text => (status, text),
    }
}

/// `1 run`, `3 runs`.
pub(crate) fn count(n: usize, one: &str) -> String {
    if n == 1 { format!("1 {one}") } else { format!("{n} {one}s") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ages_are_formatted_in_the_largest_unit() {
        let now = Timestamp::from_secs(1_000_000);
        let message = |secs| ago(now - Span::secs(secs), now);
        let all = [message(0), message(59), message(60), message(7200), message(3 * 86_400)];
        assert_eq!(all, ["now", "59 s ago", "1 min ago", "2 h ago", "3 d ago"]);
    }

    #[test]
    fn local_machine_and_remote_hosts_are_shown_as_different_backends() {
        let message = [("remote", "local"), ("remote", "remote"), ("aws", "us-east-1")]
            .map(|(name, region)| backend(name, region));
        assert_eq!(message, ["local", "ssh", "aws"]);
    }

    #[test]
    fn a_sentence_is_shown_as_message_not_as_status() {
        assert_eq!(split_status("failed", "exited (3)"), ("exited (3)", ""));
        assert_eq!(split_status("running", ""), ("running", ""));
        let sentence = "no place for it now: local-0 needs 64 CPUs, has 2";
        assert_eq!(split_status("pending", sentence), ("pending", sentence));
    }

    #[test]
    fn sizes_are_formatted_in_gb_or_mb() {
        let sizes = [size(16.0), size(1.5), size(100.0 / 1024.0), size(1500.0 / 1024.0), size(0.0)];
        assert_eq!(sizes, ["16GB", "1.5GB", "100MB", "1500MB", "0GB"]);
    }

    #[test]
    fn prices_have_no_trailing_zeros() {
        assert_eq!([price(0.0), price(1.25), price(0.0004), price(12.0)], ["$0", "$1.25", "$0.0004", "$12"]);
        assert_eq!(price(Price::UNKNOWN.as_dollars()), "unknown");
    }

    #[test]
    fn resources_are_formatted_on_one_line() {
        let host = json!({"cpus": 26, "cpu_arch": "x86", "memory_mib": 229_376, "spot": true, "disk": {"size_mib": 1536},
            "gpus": [{"name": "H100", "memory_mib": 81920}, {"name": "H100", "memory_mib": 81920}]});
        assert_eq!(resources(&host), "cpu=x86:26 mem=224GB disk=1.5GB gpu=H100:80GB:2 (spot)");
    }
}
