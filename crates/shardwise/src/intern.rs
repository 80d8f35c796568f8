//! Values that exist once per process: comparing or hashing two of them is comparing or hashing a pointer.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::ops::Deref;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

/// A shared value; two handles are equal exactly if they hold the same allocation.
pub(crate) struct Interned<T>(Arc<T>);

impl<T> Clone for Interned<T> {
    fn clone(&self) -> Self {
        Interned(Arc::clone(&self.0))
    }
}

impl<T> Deref for Interned<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> PartialEq for Interned<T> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl<T> Eq for Interned<T> {}

impl<T> Hash for Interned<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.0).hash(state);
    }
}

impl<T: fmt::Debug> fmt::Debug for Interned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The table of one type. It holds no value alive: an entry whose last handle is gone is swept out as the table grows.
pub(crate) struct Interner<T> {
    hasher: RandomState,
    table: Mutex<Table<T>>,
}

struct Table<T> {
    by_hash: HashMap<u64, Vec<Weak<T>>>,
    sweep_at: usize,
}

/// Entries below which sweeping is not worth the walk.
const FIRST_SWEEP: usize = 1024;

impl<T: Eq + Hash> Interner<T> {
    pub(crate) fn new() -> Self {
        Interner {
            hasher: RandomState::new(),
            table: Mutex::new(Table { by_hash: HashMap::new(), sweep_at: FIRST_SWEEP }),
        }
    }

    /// The handle of `value`: the existing one if an equal value is alive.
    pub(crate) fn intern(&self, value: T) -> Interned<T> {
        let hash = self.hasher.hash_one(&value);
        let mut table = self.table.lock();
        if table.by_hash.len() >= table.sweep_at {
            table.by_hash.retain(|_, bucket| {
                bucket.retain(|weak| weak.strong_count() > 0);
                !bucket.is_empty()
            });
            table.sweep_at = (2 * table.by_hash.len()).max(FIRST_SWEEP);
        }
        let bucket = table.by_hash.entry(hash).or_default();
        if let Some(found) = bucket.iter().filter_map(Weak::upgrade).find(|found| **found == value) {
            return Interned(found);
        }
        // Dead entries of this bucket go now: values that come and go again and again must not pile up.
        bucket.retain(|weak| weak.strong_count() > 0);
        let new = Arc::new(value);
        bucket.push(Arc::downgrade(&new));
        Interned(new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_share_one_allocation_and_dead_ones_are_swept() {
        let interner = Interner::new();
        let a = interner.intern("a".to_string());
        assert!(a == interner.intern("a".to_string()));
        assert!(a != interner.intern("b".to_string()));
        for i in 0..10 * FIRST_SWEEP {
            interner.intern(i.to_string());
        }
        assert!(interner.table.lock().by_hash.len() <= FIRST_SWEEP + 1);
        for _ in 0..1000 {
            interner.intern("again".to_string());
        }
        assert!(interner.table.lock().by_hash.values().all(|bucket| bucket.len() <= 2));
        assert!(a == interner.intern("a".to_string()));
    }
}
