import { mount } from 'svelte';
import './app.css';
import App from './App.svelte';
import { listenForKeys } from './lib/keys.svelte';
import { applyTheme } from './lib/prefs.svelte';
import { followLinks } from './lib/route.svelte';

applyTheme();
followLinks();
listenForKeys();
const target = document.getElementById('app');
if (target) mount(App, { target });
