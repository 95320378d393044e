//! Validity period of a certificate. Parses nothing else of it.

const SEQUENCE: u8 = 0x30;
const VERSION: u8 = 0xa0;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;

/// Returns the start and the end of the validity, in seconds of Unix time; `None` if this is not a certificate.
pub(crate) fn period(der: &[u8]) -> Option<(i64, i64)> {
    let (certificate, _) = read_tagged(der, SEQUENCE)?;
    let (info, _) = read_tagged(certificate, SEQUENCE)?;
    // The version is optional. Serial number, algorithm and issuer follow.
    let mut rest = read_tagged(info, VERSION).map_or(info, |(_, rest)| rest);
    for _ in 0..3 {
        rest = read_element(rest)?.2;
    }
    let (life, _) = read_tagged(rest, SEQUENCE)?;
    let (tag, from, rest) = read_element(life)?;
    let from = parse_time(tag, from)?;
    let (tag, until, _) = read_element(rest)?;
    Some((from, parse_time(tag, until)?))
}

/// Returns the tag, the content and the remaining input.
fn read_element(input: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (tag, rest) = input.split_first()?;
    let (first, rest) = rest.split_first()?;
    let (length, rest) = if *first < 0x80 {
        (usize::from(*first), rest)
    } else {
        let (bytes, rest) = rest.split_at_checked(usize::from(*first & 0x7f))?;
        // No certificate needs a length of more than four bytes.
        let length = if bytes.len() <= 4 { bytes } else { return None };
        (length.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte)), rest)
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some((*tag, content, rest))
}

fn read_tagged(input: &[u8], wanted: u8) -> Option<(&[u8], &[u8])> {
    read_element(input).filter(|(tag, ..)| *tag == wanted).map(|(_, content, rest)| (content, rest))
}

/// Parses `261120093000Z`, or the same with a four-digit year.
fn parse_time(tag: u8, text: &[u8]) -> Option<i64> {
    let text = std::str::from_utf8(text).ok()?.strip_suffix('Z')?;
    let (year, rest) = match tag {
        UTC_TIME => {
            let (year, rest) = text.split_at_checked(2)?;
            let year: i64 = year.parse().ok()?;
            (if year < 50 { 2000 + year } else { 1900 + year }, rest)
        }
        GENERALIZED_TIME => {
            let (year, rest) = text.split_at_checked(4)?;
            (year.parse().ok()?, rest)
        }
        _ => return None,
    };
    let part = |at: usize| rest.get(at..at + 2)?.parse::<i64>().ok();
    let (month, day) = (part(0)?, part(2)?);
    Some(days_since_epoch(year, month, day) * 86_400 + part(4)? * 3_600 + part(6)? * 60 + part(8)?)
}

/// Returns the days since 1970 in the Gregorian calendar. The year starts in March, so that a leap day is its last day.
fn days_since_epoch(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn validity_period_of_a_certificate_is_parsed() {
        let (der, _) = super::super::self_signed(&["a.test".to_owned()]).unwrap();
        assert_eq!(period(&der), Some((1_704_067_200, 253_402_300_799)));
        for end in 0..der.len().min(120) {
            assert_eq!(period(&der[..end]), None);
        }
    }

    #[test]
    fn utc_times_and_generalized_times_are_parsed() {
        assert_eq!(parse_time(UTC_TIME, b"700101000000Z"), Some(0));
        assert_eq!(parse_time(UTC_TIME, b"260301000001Z"), Some(1_772_323_201));
        assert_eq!(parse_time(GENERALIZED_TIME, b"20240229120000Z"), Some(1_709_208_000));
        for wrong in [&b"20240229120000"[..], b"2024", b"", b"aaaaaaaaaaaaaaZ"] {
            assert_eq!(parse_time(GENERALIZED_TIME, wrong), None);
        }
    }
}
