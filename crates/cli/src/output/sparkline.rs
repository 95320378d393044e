//! Charts in one line of text.

const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Renders one bar for each of `width` equal parts of the period, oldest first: the mean of its points relative to
/// `full`. Parts without a point are blank.
pub(crate) fn sparkline(points: &[(i64, f64)], from: i64, until: i64, width: usize, full: f64) -> String {
    let mut sums = vec![(0.0, 0_u32); width];
    let length = until.saturating_sub(from).max(1);
    for (at, value) in points {
        let part =
            i128::from(at.saturating_sub(from)) * i128::try_from(width).unwrap_or(1) / i128::from(length);
        let Ok(part) = usize::try_from(part) else { continue };
        // The end of the period belongs to the last part.
        if let Some((sum, count)) = sums.get_mut(part.min(width.saturating_sub(1))).filter(|_| *at <= until) {
            (*sum, *count) = (*sum + value, *count + 1);
        }
    }
    let bar =
        |(sum, count): &(f64, u32)| if *count == 0 { ' ' } else { bar_for(sum / f64::from(*count), full) };
    sums.iter().map(bar).collect()
}

fn bar_for(value: f64, full: f64) -> char {
    let part = if full > 0.0 { (value / full).clamp(0.0, 1.0) } else { 0.0 };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to 7")]
    let at = (part * 7.0).round() as usize;
    BARS[at.min(BARS.len() - 1)]
}

#[cfg(test)]
mod tests {
    use super::sparkline;

    #[test]
    fn sparkline_is_scaled_to_the_given_maximum() {
        let points = [(0, 0.0), (10, 50.0), (20, 100.0), (40, 400.0)];
        assert_eq!(sparkline(&points, 0, 50, 5, 100.0), "▁▅█ █");
    }

    #[test]
    fn sparkline_averages_points_per_column_and_ignores_points_out_of_range() {
        assert_eq!(sparkline(&[(0, 0.0), (1, 100.0), (-5, 100.0), (99, 100.0)], 0, 10, 2, 100.0), "▅ ");
        assert_eq!(sparkline(&[(10, 100.0)], 0, 10, 2, 100.0), " █");
        assert_eq!(sparkline(&[], 0, 0, 3, 0.0), "   ");
        assert_eq!(sparkline(&[(0, 5.0)], 0, 0, 1, 0.0), "▁");
    }
}
