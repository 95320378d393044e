//! Plain scalars of YAML 1.1: booleans, numbers and null.
//!
//! Existing configurations were written against a YAML 1.1 reader, so `yes`, `010` and `1:30` mean what they meant
//! there. The text is kept next to the meaning: where a string is expected, `3.10` stays `3.10`.

/// Meaning of a plain scalar.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ScalarValue {
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    Str,
}

/// Resolves the text of a plain (unquoted) scalar.
pub fn resolve_scalar(text: &str) -> ScalarValue {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return ScalarValue::Null,
        "yes" | "Yes" | "YES" | "true" | "True" | "TRUE" | "on" | "On" | "ON" => {
            return ScalarValue::Bool(true);
        }
        "no" | "No" | "NO" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" => {
            return ScalarValue::Bool(false);
        }
        ".nan" | ".NaN" | ".NAN" => return ScalarValue::Float(f64::NAN),
        _ => {}
    }
    let (negative, digits) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    if matches!(digits, ".inf" | ".Inf" | ".INF") {
        return ScalarValue::Float(if negative { f64::NEG_INFINITY } else { f64::INFINITY });
    }
    if !digits.bytes().next().is_some_and(|b| b.is_ascii_digit() || b == b'.') {
        return ScalarValue::Str;
    }
    if let Some(n) = integer(digits) {
        return ScalarValue::Int(if negative { -n } else { n });
    }
    float(digits).map_or(ScalarValue::Str, |n| ScalarValue::Float(if negative { -n } else { n }))
}

fn integer(digits: &str) -> Option<i64> {
    let radix = |text: &str, radix: u32| {
        let text = text.replace('_', "");
        (!text.is_empty()).then(|| i64::from_str_radix(&text, radix).ok()).flatten()
    };
    if let Some(rest) = digits.strip_prefix("0b") {
        return rest.bytes().all(|b| matches!(b, b'0' | b'1' | b'_')).then(|| radix(rest, 2)).flatten();
    }
    if let Some(rest) = digits.strip_prefix("0x") {
        return rest.bytes().all(|b| b.is_ascii_hexdigit() || b == b'_').then(|| radix(rest, 16)).flatten();
    }
    if digits.len() > 1 && digits.starts_with('0') && digits.bytes().all(|b| matches!(b, b'0'..=b'7' | b'_'))
    {
        return radix(digits, 8);
    }
    if digits.contains(':') {
        return sexagesimal(digits);
    }
    let decimal = digits == "0"
        || digits.starts_with(|c: char| ('1'..='9').contains(&c))
            && digits.bytes().all(|b| b.is_ascii_digit() || b == b'_');
    decimal.then(|| radix(digits, 10)).flatten()
}

/// Parses base 60, with each later part below 60: `1:30` is ninety.
fn sexagesimal(digits: &str) -> Option<i64> {
    let mut parts = digits.split(':');
    let first = parts.next()?;
    if !first.starts_with(|c: char| ('1'..='9').contains(&c)) {
        return None;
    }
    let mut total: i64 = first.replace('_', "").parse().ok()?;
    for part in parts {
        let valid = matches!(part.as_bytes(), [b'0'..=b'9'] | [b'0'..=b'5', b'0'..=b'9']);
        if !valid {
            return None;
        }
        total = total.checked_mul(60)?.checked_add(part.parse().ok()?)?;
    }
    Some(total)
}

/// Parses a float. YAML 1.1 requires a dot, and a sign in the exponent: `1e3` is a string, `1.0e+3` a number.
fn float(digits: &str) -> Option<f64> {
    let (mantissa, exponent) = match digits.find(['e', 'E']) {
        Some(at) => (&digits[..at], Some(&digits[at + 1..])),
        None => (digits, None),
    };
    let (whole, fraction) = mantissa.split_once('.')?;
    let number = |text: &str| text.bytes().all(|b| b.is_ascii_digit() || b == b'_');
    if !number(whole) || !number(fraction) || (whole.is_empty() && fraction.is_empty()) {
        return None;
    }
    if let Some(exponent) = exponent {
        let digits = exponent.strip_prefix(['+', '-'])?;
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
    }
    digits.replace('_', "").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_scalars_resolve_by_yaml_1_1_rules() {
        let cases = [
            ("yes", ScalarValue::Bool(true)),
            ("Off", ScalarValue::Bool(false)),
            ("y", ScalarValue::Str),
            ("~", ScalarValue::Null),
            ("", ScalarValue::Null),
            ("0", ScalarValue::Int(0)),
            ("-12", ScalarValue::Int(-12)),
            ("010", ScalarValue::Int(8)),
            ("08", ScalarValue::Str),
            ("0x1F", ScalarValue::Int(31)),
            ("0b101", ScalarValue::Int(5)),
            ("1_000", ScalarValue::Int(1000)),
            ("1:30", ScalarValue::Int(90)),
            ("8080:22", ScalarValue::Int(484_822)),
            ("80:80", ScalarValue::Str),
            ("3.10", ScalarValue::Float(3.1)),
            (".5", ScalarValue::Float(0.5)),
            ("1e3", ScalarValue::Str),
            ("1.0e+3", ScalarValue::Float(1000.0)),
            ("1e999", ScalarValue::Str),
            ("..8", ScalarValue::Str),
            ("4..", ScalarValue::Str),
            (".", ScalarValue::Str),
            ("-", ScalarValue::Str),
            ("99999999999999999999", ScalarValue::Str),
            ("-.inf", ScalarValue::Float(f64::NEG_INFINITY)),
        ];
        for (text, meaning) in cases {
            assert_eq!(resolve_scalar(text), meaning, "{text:?}");
        }
        assert!(matches!(resolve_scalar(".nan"), ScalarValue::Float(n) if n.is_nan()));
    }
}
