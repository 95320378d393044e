/** Pages of the navigation, in its order. The first nine have the keys 1 to 9. */
export interface Section {
  path: string;
  label: string;
  icon: string;
  group: string;
  admin?: boolean;
}

export const SECTIONS: Section[] = [
  { path: '/', label: 'Overview', icon: 'overview', group: '' },
  { path: '/runs', label: 'Runs', icon: 'runs', group: 'Work' },
  { path: '/jobs', label: 'Managed jobs', icon: 'jobs', group: 'Work' },
  { path: '/services', label: 'Services', icon: 'services', group: 'Work' },
  { path: '/queue', label: 'Queue', icon: 'queue', group: 'Work' },
  { path: '/containers', label: 'Containers', icon: 'containers', group: 'Work' },
  { path: '/fleets', label: 'Fleets', icon: 'fleets', group: 'Capacity' },
  { path: '/instances', label: 'Instances', icon: 'instances', group: 'Capacity' },
  { path: '/offers', label: 'Offers', icon: 'offers', group: 'Capacity' },
  { path: '/volumes', label: 'Volumes', icon: 'volumes', group: 'Capacity' },
  { path: '/gateways', label: 'Gateways', icon: 'gateways', group: 'Capacity' },
  { path: '/events', label: 'Events', icon: 'events', group: 'Insight' },
  { path: '/costs', label: 'Costs', icon: 'costs', group: 'Insight' },
  { path: '/usage', label: 'Usage', icon: 'usage', group: 'Insight' },
  { path: '/projects', label: 'Projects', icon: 'projects', group: 'Settings' },
  { path: '/admin', label: 'Admin', icon: 'admin', group: 'Settings', admin: true },
];
