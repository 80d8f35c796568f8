//! Contraction order of a product of three or more tensors: the order of pairwise products with the fewest multiplications.

use crate::ops::products::equation::{Equation, Label, Sizes, Term, distinct, size_of};

/// With more factors than this the order is greedy (cheapest pair first) instead of optimal. The search visits 3^n pairs of
/// sets of factors, 6,561 for eight, which takes less time than the products that it chooses between.
const SEARCHED: usize = 8;

/// One pairwise product. Factors are numbered: first those of the equation, then the results of products in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::ops) struct PairProduct {
    pub(in crate::ops) factors: [usize; 2],
    pub(in crate::ops) output: Term,
}

/// The pairwise products of an equation with two or more factors, none of which broadcasts, in order.
pub(in crate::ops) fn order(equation: &Equation, sizes: &Sizes) -> Vec<PairProduct> {
    let problem = OrderSearch { equation, sizes };
    let mut steps = if equation.inputs.len() <= SEARCHED { problem.search() } else { problem.greedy() };
    let last = steps.last_mut().expect("two or more factors");
    last.output.clone_from(&equation.output);
    steps
}

/// A set of at most [`SEARCHED`] factors, one bit each.
type FactorSet = usize;

struct OrderSearch<'a> {
    equation: &'a Equation,
    sizes: &'a Sizes,
}

impl OrderSearch<'_> {
    /// The labels of the product of the factors `inside` that the output or another factor needs.
    fn kept(&self, factors: &[Term], inside: impl Fn(usize) -> bool) -> Term {
        let used = |label: &Label| {
            let mut others = factors.iter().enumerate().filter(|(i, _)| !inside(*i));
            self.equation.output.contains(label) || others.any(|(_, term)| term.contains(label))
        };
        let own = factors.iter().enumerate().filter(|(i, _)| inside(*i)).flat_map(|(_, term)| term);
        distinct(&own.copied().filter(used).collect::<Term>())
    }

    /// The labels of a factor, or of a product of factors.
    fn labels(&self, set: FactorSet) -> Term {
        match set.count_ones() {
            1 => self.equation.inputs[set.trailing_zeros() as usize].clone(),
            _ => self.kept(&self.equation.inputs, |i| set >> i & 1 == 1),
        }
    }

    /// The number of multiplications of one pairwise product.
    fn cost(&self, a: &[Label], b: &[Label]) -> f64 {
        let both: Term = a.iter().chain(b).copied().collect();
        distinct(&both).into_iter().map(|label| size_of(self.sizes, label) as f64).product()
    }

    /// The optimal order, by dynamic programming: for every set of factors the cheapest way to split it in two.
    fn search(&self) -> Vec<PairProduct> {
        let count = self.equation.inputs.len();
        let all: FactorSet = (1 << count) - 1;
        let labels: Vec<Term> = (0..=all).map(|set| if set == 0 { Term::new() } else { self.labels(set) }).collect();
        let mut best: Vec<(f64, FactorSet)> = vec![(0.0, 0); 1 << count];
        for set in 1..=all {
            if set.count_ones() < 2 {
                continue;
            }
            let mut found = (f64::INFINITY, 0);
            // Only halves that contain the lowest factor, so that each split is tried once.
            let lowest = set & set.wrapping_neg();
            let mut half = (set - 1) & set;
            while half > 0 {
                let rest = set & !half;
                if half & lowest > 0 {
                    let own = self.cost(&labels[half], &labels[rest]);
                    let cost = best[half].0 + best[rest].0 + own;
                    if cost < found.0 {
                        found = (cost, half);
                    }
                }
                half = (half - 1) & set;
            }
            best[set] = found;
        }
        let mut steps = Vec::new();
        self.steps(&best, all, &mut steps);
        steps
    }

    /// Appends the products of a set of factors, and returns the number of the result.
    fn steps(&self, best: &[(f64, FactorSet)], set: FactorSet, steps: &mut Vec<PairProduct>) -> usize {
        if set.count_ones() == 1 {
            return set.trailing_zeros() as usize;
        }
        let half = best[set].1;
        let factors = [self.steps(best, half, steps), self.steps(best, set & !half, steps)];
        steps.push(PairProduct { factors, output: self.kept(&self.equation.inputs, |i| set >> i & 1 == 1) });
        self.equation.inputs.len() + steps.len() - 1
    }

    /// The greedy order: the cheapest pair first, again and again.
    fn greedy(&self) -> Vec<PairProduct> {
        let mut numbers: Vec<usize> = (0..self.equation.inputs.len()).collect();
        let mut terms = self.equation.inputs.to_vec();
        let mut steps = Vec::new();
        while terms.len() > 1 {
            let pairs = (0..terms.len()).flat_map(|b| (0..b).map(move |a| (a, b)));
            let cost = |&(a, b): &(usize, usize)| self.cost(&terms[a], &terms[b]);
            let (a, b) = pairs.min_by(|x, y| cost(x).total_cmp(&cost(y))).expect("two or more factors");
            let output = self.kept(&terms, |i| i == a || i == b);
            let factors = [numbers[a], numbers[b]];
            for i in [b, a] {
                terms.remove(i);
                numbers.remove(i);
            }
            terms.push(output.clone());
            numbers.push(self.equation.inputs.len() + steps.len());
            steps.push(PairProduct { factors, output });
        }
        steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    /// A random product of `count` factors, their shapes and the sizes of their labels.
    fn product(rng: &mut StdRng, count: usize) -> (Equation, Vec<Vec<usize>>, Sizes) {
        let letters: Vec<char> = "abcdef".chars().collect();
        let extent: Vec<usize> = letters.iter().map(|_| rng.random_range(2..9)).collect();
        let mut terms = Vec::new();
        let mut shapes = Vec::new();
        for _ in 0..count {
            let chosen: Vec<usize> = (0..letters.len()).filter(|_| rng.random_range(0..10) < 4).collect();
            terms.push(chosen.iter().map(|&i| letters[i]).collect::<String>());
            shapes.push(chosen.iter().map(|&i| extent[i]).collect::<Vec<_>>());
        }
        let output: String =
            letters.iter().filter(|c| terms.iter().any(|t| t.contains(**c)) && rng.random_range(0..2) == 0).collect();
        let ndims: Vec<usize> = shapes.iter().map(Vec::len).collect();
        let equation = Equation::parse(&format!("{}->{output}", terms.join(",")), &ndims).unwrap();
        let sizes = equation.sizes("einsum", &shapes.iter().map(Vec::as_slice).collect::<Vec<_>>(), true).unwrap();
        (equation, shapes, sizes)
    }

    /// The number of multiplications of an order, counted on shapes.
    fn total(equation: &Equation, shapes: &[Vec<usize>], steps: &[PairProduct]) -> f64 {
        let mut factors: Vec<(Term, Vec<usize>)> =
            equation.inputs.iter().cloned().zip(shapes.iter().cloned()).collect();
        let mut total = 0.0;
        for step in steps {
            let pair = step.factors.map(|i| factors[i].clone());
            let of = |label: Label| {
                let sizes = pair.iter().flat_map(|(term, shape)| term.iter().zip(shape)).filter(|(l, _)| **l == label);
                sizes.map(|(_, &n)| n).max()
            };
            let mut labels: Vec<Label> = pair.iter().flat_map(|(term, _)| term.iter().copied()).collect();
            labels.sort_unstable();
            labels.dedup();
            total += labels.iter().map(|&l| of(l).unwrap() as f64).product::<f64>();
            let shape = step.output.iter().map(|&l| of(l).unwrap()).collect();
            factors.push((step.output.clone(), shape));
        }
        total
    }

    /// The fewest multiplications of all orders, by brute force.
    fn brute_force(output: &[Label], factors: &[(Term, Vec<usize>)]) -> f64 {
        if factors.len() == 1 {
            return 0.0;
        }
        let mut least = f64::INFINITY;
        for b in 0..factors.len() {
            for a in 0..b {
                let pair = [&factors[a], &factors[b]];
                let others: Vec<_> =
                    (0..factors.len()).filter(|&i| i != a && i != b).map(|i| factors[i].clone()).collect();
                let mut labels: Vec<Label> = pair.iter().flat_map(|(term, _)| term.iter().copied()).collect();
                labels.sort_unstable();
                labels.dedup();
                let size = |label: Label| {
                    let sizes = pair.iter().flat_map(|(term, shape)| term.iter().zip(shape));
                    sizes.filter(|(l, _)| **l == label).map(|(_, &n)| n).max().unwrap()
                };
                let cost: f64 = labels.iter().map(|&l| size(l) as f64).product();
                let used = |l: &Label| output.contains(l) || others.iter().any(|(term, _)| term.contains(l));
                let kept: Term = labels.iter().copied().filter(used).collect();
                let shape = kept.iter().map(|&l| size(l)).collect();
                let rest = [others, vec![(kept, shape)]].concat();
                least = least.min(cost + brute_force(output, &rest));
            }
        }
        least
    }

    #[test]
    fn the_order_is_optimal() {
        let mut cheaper_than_in_order = 0;
        for seed in 0..400 {
            let rng = &mut StdRng::seed_from_u64(seed);
            let count = rng.random_range(2..6);
            let (equation, shapes, sizes) = product(rng, count);
            let steps = order(&equation, &sizes);
            assert_eq!(steps.len(), equation.inputs.len() - 1);
            let factors: Vec<_> = equation.inputs.iter().cloned().zip(shapes.iter().cloned()).collect();
            let (found, least) = (total(&equation, &shapes, &steps), brute_force(&equation.output, &factors));
            assert_eq!(found, least, "seed {seed}: {equation} of {shapes:?} by {steps:?}");
            let greedy = OrderSearch { equation: &equation, sizes: &sizes }.greedy();
            assert!(total(&equation, &shapes, &greedy) >= least);
            cheaper_than_in_order += usize::from(least < in_order(&equation, &shapes));
        }
        assert!(cheaper_than_in_order > 100, "{cheaper_than_in_order}");
    }

    /// The number of multiplications from the first factor to the last.
    fn in_order(equation: &Equation, shapes: &[Vec<usize>]) -> f64 {
        let count = equation.inputs.len();
        let kept = |last: usize| -> Term {
            let (done, later) = equation.inputs.split_at(last + 1);
            let used = |l: &Label| equation.output.contains(l) || later.iter().any(|t| t.contains(l));
            let labels: Vec<Label> = done.iter().flatten().copied().filter(used).collect();
            distinct(&labels)
        };
        let step = |i: usize| PairProduct { factors: [if i == 1 { 0 } else { count + i - 2 }, i], output: kept(i) };
        total(equation, shapes, &(1..count).map(step).collect::<Vec<_>>())
    }

    #[test]
    fn many_factors_are_multiplied_greedily() {
        // Ten matrices whose products stay small only from the right.
        let text: Vec<String> = (b'a'..b'k').map(|c| format!("{}{}", char::from(c), char::from(c + 1))).collect();
        let equation = Equation::parse(&format!("{}->ak", text.join(",")), &[2; 10]).unwrap();
        let mut shapes = vec![vec![20, 20]; 10];
        shapes[9] = vec![20, 1];
        let views: Vec<&[usize]> = shapes.iter().map(Vec::as_slice).collect();
        let sizes = equation.sizes("einsum", &views, true).unwrap();
        let steps = order(&equation, &sizes);
        assert_eq!(total(&equation, &shapes, &steps), 9.0 * 400.0);
        assert_eq!(steps[8].output, equation.output);
        let many = Equation::parse(&format!("{}->a", ["a"; 70].join(",")), &[1; 70]).unwrap();
        let sizes = many.sizes("einsum", &[&[3][..]; 70], true).unwrap();
        assert_eq!(order(&many, &sizes).len(), 69);
    }
}
