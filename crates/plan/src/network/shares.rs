//! The max-min fair shares of transfers that pass at the same time.
//!
//! A transfer runs at a share of the speed that it has alone. The shares of those that meet on a link grow together
//! until the link is full; then they stand, and the others grow on (progressive filling). Two transfers that need one
//! link whole get half each. When one starts or ends, only those that are joined to it by shared links are looked at
//! again.

use super::traffic::Phase;

/// A transfer under way.
#[derive(Clone, Debug)]
struct Flow {
    /// The links, each with the share of its bandwidth at full speed.
    uses: Vec<(u32, f64)>,
    alone_s: f64,
    /// The part that is left at `since`, 0 to 1.
    left: f64,
    /// The share of the full speed.
    share: f64,
    since: f64,
}

/// A link with the flows that pass it.
#[derive(Clone, Debug, Default)]
struct Link {
    flows: Vec<u32>,
    mark: u32,
    /// The share of its bandwidth that is used since `since`.
    used: f64,
    since: f64,
    /// The integral of `used`.
    busy_s: f64,
    most: f64,
    room: f64,
    weight: f64,
}

/// The transfers under way and their shares of the links.
#[derive(Clone, Debug)]
pub(crate) struct Shares {
    links: Vec<Link>,
    flows: Vec<Flow>,
    flow_marks: Vec<u32>,
    free: Vec<u32>,
    mark: u32,
    near_flows: Vec<u32>,
    near_links: Vec<u32>,
}

/// The use of a link over time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct LinkUse {
    /// The seconds that the link would have been full for what it carried.
    pub(crate) busy_s: f64,
    /// The largest share of the bandwidth that was used at a time.
    pub(crate) most: f64,
}

impl Shares {
    pub(crate) fn new(num_links: usize) -> Self {
        Self {
            links: vec![Link::default(); num_links],
            flows: Vec::new(),
            flow_marks: Vec::new(),
            free: Vec::new(),
            mark: 0,
            near_flows: Vec::new(),
            near_links: Vec::new(),
        }
    }

    /// Starts a phase at `now`. Those whose end changes are given by [`Shares::changed`].
    pub(crate) fn start(&mut self, phase: &Phase, now: f64) -> u32 {
        let flow = Flow { uses: phase.uses.clone(), alone_s: phase.alone_s, left: 1.0, share: 0.0, since: now };
        let id = match self.free.pop() {
            Some(id) => {
                self.flows[id as usize] = flow;
                id
            }
            None => {
                self.flows.push(flow);
                self.flow_marks.push(0);
                self.flows.len() as u32 - 1
            }
        };
        for &(link, _) in &self.flows[id as usize].uses {
            self.links[link as usize].flows.push(id);
        }
        self.find_near(id);
        self.fill(now);
        id
    }

    /// Ends a flow at `now`.
    pub(crate) fn end(&mut self, id: u32, now: f64) {
        self.find_near(id);
        let uses = std::mem::take(&mut self.flows[id as usize].uses);
        for &(link, _) in &uses {
            self.links[link as usize].flows.retain(|&flow| flow != id);
        }
        self.near_flows.retain(|&flow| flow != id);
        self.free.push(id);
        self.fill(now);
    }

    /// Returns the flows whose share was computed again by the last start or end.
    pub(crate) fn changed(&self) -> &[u32] {
        &self.near_flows
    }

    /// Returns when a flow ends if nothing else starts or ends.
    pub(crate) fn end_of(&self, id: u32) -> f64 {
        let flow = &self.flows[id as usize];
        flow.since + flow.left * flow.alone_s / flow.share
    }

    /// Returns the use of each link until `now`.
    pub(crate) fn link_uses(&self, now: f64) -> Vec<LinkUse> {
        let of = |link: &Link| LinkUse { busy_s: link.busy_s + link.used * (now - link.since), most: link.most };
        self.links.iter().map(of).collect()
    }

    /// Finds the flows and links that a flow is joined to, itself among them.
    fn find_near(&mut self, id: u32) {
        self.mark += 1;
        self.near_flows.clear();
        self.near_links.clear();
        self.near_flows.push(id);
        self.flow_marks[id as usize] = self.mark;
        let mut next = 0;
        while let Some(&flow) = self.near_flows.get(next) {
            next += 1;
            for &(link, _) in &self.flows[flow as usize].uses {
                let of = &mut self.links[link as usize];
                if of.mark == self.mark {
                    continue;
                }
                of.mark = self.mark;
                self.near_links.push(link);
                for &other in &of.flows {
                    if self.flow_marks[other as usize] != self.mark {
                        self.flow_marks[other as usize] = self.mark;
                        self.near_flows.push(other);
                    }
                }
            }
        }
    }

    /// Gives the flows found their shares from `now` on.
    fn fill(&mut self, now: f64) {
        for &id in &self.near_flows {
            let flow = &mut self.flows[id as usize];
            flow.left = (flow.left - (now - flow.since) * flow.share / flow.alone_s).max(0.0);
            (flow.since, flow.share) = (now, 0.0);
        }
        for &link in &self.near_links {
            let of = &mut self.links[link as usize];
            of.busy_s += of.used * (now - of.since);
            (of.since, of.used, of.room, of.weight) = (now, 0.0, 1.0, 0.0);
        }
        for &id in &self.near_flows {
            for &(link, full) in &self.flows[id as usize].uses {
                self.links[link as usize].weight += full;
            }
        }
        let mut num_left = self.near_flows.len();
        while num_left > 0 {
            let tightest = self.near_links.iter().copied().filter(|&link| self.links[link as usize].weight > 0.0);
            let of = |link: &u32| self.links[*link as usize].room / self.links[*link as usize].weight;
            let Some(tightest) = tightest.min_by(|a, b| of(a).total_cmp(&of(b))) else { break };
            let share = of(&tightest).min(1.0);
            num_left -= self.fix(tightest, share);
        }
        for &link in &self.near_links {
            let of = &mut self.links[link as usize];
            of.used = 1.0 - of.room;
            of.most = of.most.max(of.used);
        }
    }

    /// Fixes the shares of the flows on a link that have none; returns their number.
    fn fix(&mut self, tightest: u32, share: f64) -> usize {
        let mut num = 0;
        for index in 0..self.links[tightest as usize].flows.len() {
            let id = self.links[tightest as usize].flows[index] as usize;
            if self.flows[id].share > 0.0 {
                continue;
            }
            num += 1;
            self.flows[id].share = share.max(f64::MIN_POSITIVE);
            for &(link, full) in &self.flows[id].uses {
                let of = &mut self.links[link as usize];
                of.room = (of.room - share * full).max(0.0);
                // The last flow of a link leaves nothing, whatever rounding does.
                of.weight = if of.weight - full > 1e-9 * full { of.weight - full } else { 0.0 };
            }
        }
        self.links[tightest as usize].weight = 0.0;
        num
    }
}

#[cfg(test)]
#[path = "shares_tests.rs"]
mod tests;
