//! Number helpers that the optimizer and its backends both use: powers of two, and the fixed order in which
//! terms are added (`docs/summation.md`).

/// Leaves of the tree that sums fold in.
pub(crate) const LEAVES: usize = 256;
/// Leaves that join first.
pub(crate) const GROUP: usize = 32;

/// ⌊log₂ x⌋ of a positive finite number.
pub(crate) fn exponent_of(x: f64) -> i32 {
    let field = (x.to_bits() >> 52) as i32;
    if field == 0 {
        // Subnormal: the scaling is exact.
        return exponent_of(x * power_of_two(64)) - 64;
    }
    field - 1023
}

/// 2^exponent for a normal result.
pub(crate) fn power_of_two(exponent: i32) -> f64 {
    debug_assert!((-1022..=1023).contains(&exponent));
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// Σ of a list of any length: term i goes to leaf i mod 256, each leaf adds its terms in order, the leaves
/// fold in the tree.
pub(crate) fn fold(terms: impl IntoIterator<Item = f64>) -> f64 {
    let mut terms = terms.into_iter();
    // Most lists are short, many of one term; leaves that are 0 at the upper half of a tree change nothing.
    let only = terms.next().map_or(0.0, |term| 0.0 + term);
    let Some(second) = terms.next() else { return only };
    let (mut first, mut count) = ([0.0; GROUP], 2);
    (first[0], first[1]) = (only, 0.0 + second);
    for (leaf, term) in first[2..].iter_mut().zip(&mut terms) {
        *leaf += term;
        count += 1;
    }
    let Some(next) = terms.next() else { return halve(&mut first[..usize::next_power_of_two(count)]) };
    let mut leaves = [0.0; LEAVES];
    leaves[..GROUP].copy_from_slice(&first);
    leaves[GROUP] += next;
    let mut place = GROUP;
    for term in terms {
        place = (place + 1) % LEAVES;
        leaves[place] += term;
    }
    tree(&mut leaves)
}

/// Joins leaf t with leaf t + 16, 8, 4, 2, 1 in each group of 32, then the groups, 8 of all leaves, the same
/// way. So many leaves, or fewer: a power of two.
#[inline(always)]
pub(crate) fn tree(leaves: &mut [f64]) -> f64 {
    if leaves.len() <= GROUP {
        return halve(leaves);
    }
    let mut groups = [0.0; LEAVES / GROUP];
    let count = leaves.len() / GROUP;
    for (group, leaves) in groups.iter_mut().zip(leaves.as_chunks_mut::<GROUP>().0) {
        *group = halve(leaves);
    }
    halve(&mut groups[..count])
}

/// Adds the upper half to the lower half until one term is left; the length is a power of two, of a group at
/// most.
#[inline(always)]
fn halve(terms: &mut [f64]) -> f64 {
    debug_assert!(terms.len().is_power_of_two() && terms.len() <= GROUP);
    // Halves of lengths that are known need no loops.
    macro_rules! halve {
        ($($half:literal)*) => {$(
            if let Some(terms) = terms.first_chunk_mut::<{ 2 * $half }>() {
                for i in 0..$half {
                    terms[i] += terms[i + $half];
                }
            }
        )*};
    }
    halve!(16 8 4 2 1);
    terms[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn fold_agrees_with_an_exact_sum(terms in prop::collection::vec(-1e6_f64..1e6, 0..2000)) {
            // integers below 2^53 add exactly in any order
            let terms: Vec<f64> = terms.iter().map(|t| t.round()).collect();
            let exact: i64 = terms.iter().map(|&t| t as i64).sum();
            prop_assert_eq!(fold(terms), exact as f64);
        }
    }
}
