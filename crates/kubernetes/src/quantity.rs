//! Quantities of Kubernetes: `100m`, `2`, `16Gi`, `128974848`, `1e3`.

/// Binary suffixes come first: `Ki` ends neither in `k` nor in `K`, but `M` must not match before `Mi`.
const SUFFIXES: [(&str, f64); 16] = [
    ("Ki", 1024.0),
    ("Mi", 1_048_576.0),
    ("Gi", 1_073_741_824.0),
    ("Ti", 1_099_511_627_776.0),
    ("Pi", 1_125_899_906_842_624.0),
    ("Ei", 1_152_921_504_606_846_976.0),
    ("n", 1e-9),
    ("u", 1e-6),
    ("m", 1e-3),
    ("k", 1e3),
    ("M", 1e6),
    ("G", 1e9),
    ("T", 1e12),
    ("P", 1e15),
    ("E", 1e18),
    ("", 1.0),
];

/// Parses a quantity. `None` if it is not one.
pub(crate) fn parse(text: &str) -> Option<f64> {
    let text = text.trim();
    // `1E3` is a number, `1E` is a suffix: a number is tried first.
    if let Ok(number) = text.parse::<f64>() {
        return Some(number).filter(|number| number.is_finite());
    }
    let (number, factor) = SUFFIXES
        .iter()
        .find_map(|(suffix, factor)| Some((text.strip_suffix(suffix)?, factor)))
        .filter(|(number, _)| !number.is_empty())?;
    Some(number.parse::<f64>().ok()? * factor).filter(|number| number.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_parse_with_every_kind_of_suffix() {
        for (text, value) in [
            ("2", 2.0),
            ("1.5", 1.5),
            ("100m", 0.1),
            ("16Gi", 16.0 * 1_073_741_824.0),
            ("128974848", 128_974_848.0),
            ("129M", 129e6),
            ("24Ki", 24_576.0),
            ("1e3", 1000.0),
            ("1E", 1e18),
            ("5k", 5000.0),
            ("0", 0.0),
        ] {
            let found = parse(text).unwrap();
            assert!((found - value).abs() <= value.abs() * 1e-9, "{text}: {found}");
        }
        for bad in ["", "Gi", "1Qi", "one", "NaN"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
