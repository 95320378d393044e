//! `depends_on`: resolution of names to positions, and detection of cycles.

use std::collections::BTreeMap;

/// Returns a cycle through the tasks, as positions; the last one comes before the first.
///
/// `after[k]` are the tasks that must succeed before task `k`. Depth first, without recursion: a file with a thousand
/// tasks in a row must not overflow the stack.
pub(super) fn find_cycle(after: &[Vec<usize>]) -> Option<Vec<usize>> {
    #[derive(Clone, Copy, PartialEq)]
    enum SetupState {
        Unvisited,
        InProgress,
        Visited,
    }
    let mut marks = vec![SetupState::Unvisited; after.len()];
    for start in 0..after.len() {
        if marks[start] != SetupState::Unvisited {
            continue;
        }
        marks[start] = SetupState::InProgress;
        let mut path = vec![(start, 0)];
        while let Some((node, next)) = path.last_mut() {
            let Some(&to) = after[*node].get(*next) else {
                marks[*node] = SetupState::Visited;
                path.pop();
                continue;
            };
            *next += 1;
            match marks[to] {
                SetupState::Visited => {}
                SetupState::InProgress => {
                    let nodes: Vec<usize> = path.iter().map(|(node, _)| *node).collect();
                    let from = nodes.iter().position(|node| *node == to)?;
                    return Some(nodes[from..].to_vec());
                }
                SetupState::Unvisited => {
                    marks[to] = SetupState::InProgress;
                    path.push((to, 0));
                }
            }
        }
    }
    None
}

/// Returns the position of each name; `None` if two tasks have it.
pub(super) fn name_positions<'a>(
    names: impl Iterator<Item = Option<&'a str>>,
) -> BTreeMap<&'a str, Option<usize>> {
    let mut found = BTreeMap::new();
    for (index, name) in names.enumerate() {
        if let Some(name) = name {
            found.entry(name).and_modify(|at| *at = None).or_insert(Some(index));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn find_cycle_returns_the_cycle_in_order() {
        assert_eq!(find_cycle(&[vec![], vec![0], vec![0, 1]]), None);
        assert_eq!(find_cycle(&[vec![0]]), Some(vec![0]));
        assert_eq!(find_cycle(&[vec![2], vec![0], vec![1]]), Some(vec![0, 2, 1]));
        assert_eq!(find_cycle(&[vec![], vec![2], vec![1], vec![1]]), Some(vec![1, 2]));
        let chain: Vec<Vec<usize>> =
            (0..100_000_usize).map(|k| k.checked_sub(1).into_iter().collect()).collect();
        assert_eq!(find_cycle(&chain), None);
    }
}
